"""The table of published speeds in docs/benchmarks.md."""

from titan_moe.verify.report.bench import rows


def table() -> str:
    """Returns one line for each row of titan_moe/verify/report/published.toml."""
    lines = ["| published by | GPUs | routing | tokens/s per GPU | TFLOPS | file |"]
    lines.append("|---|---|---|--:|--:|---|")
    for row in rows():
        known = row["by"], row["gpus"], row["routing"], f"{row['tokens_per_second']:,}"
        lines.append(f"| {' | '.join(known)} | {row.get('tflops', '')} | `{row['config']}.toml` |")
    return "\n".join(lines)
