"""The tables of docs/coming-from-torchtitan.md, from the data that reads torchtitan's files."""

from titan_moe.config.torchtitan import IGNORED, REFUSED, VALUES


def table() -> str:
    """Returns torchtitan's keys that do not exist here, and values with another name."""
    reasons: dict[str, list[str]] = {}
    for key, why in IGNORED.items():
        reasons.setdefault(why, []).append(f"`{key}`")
    rows = [f"| {', '.join(keys)} | no effect: {why} |" for why, keys in reasons.items()]
    rows += [f"| `{key}` | refused: {remedy} |" for key, remedy in REFUSED.items()]
    for key, names in VALUES.items():
        read = ", ".join(f"`{a}` as `{b}`" for a, b in names.items() if a != b.lower())
        if read:
            rows.append(f"| [`{key}`](configuration.md#{key}) | reads {read} |")
    return "\n".join(["| keys | here |\n|---|---|", *rows])
