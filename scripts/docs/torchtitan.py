"""The tables of docs/coming-from-torchtitan.md, from the data that reads torchtitan's files."""

from titan_moe.config.torchtitan import IGNORED, REFUSED, VALUES
from titan_moe.metrics.sinks import TORCHTITAN_NAMES


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


def metrics() -> str:
    """Returns torchtitan's names of metrics, and what they are of those here."""
    rows = ["| torchtitan | of `metrics.jsonl` |\n|---|---|"]
    for name, (ours, factor, per) in TORCHTITAN_NAMES.items():
        times, divisor = f"{factor} * " * (factor != 1), f" / `{per}`" if per else ""
        rows.append(f"| `{name}` | {times}`{ours}`{divisor} |")
    return "\n".join(rows)
