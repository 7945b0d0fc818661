"""Lays what `titan-moe plan` expects beside published speeds on H100s, of the same degrees, and
the memory estimate beside published peaks (`memory_rows`).

    python -m scripts.bench.plan_rows

Publishers name degrees and batches, and seldom recomputation, microbatches or memory: the fastest
choice of those that fit the GPU, without the 4 GiB that plan leaves, stands for theirs. Routing is
balanced in all rows but one. Sources: Automodel's performance summary, Megatron-Bridge's cards, and
MoE-ModelZoo, November 2026.
"""

from dataclasses import replace
from typing import NamedTuple

from scripts.bench import memory_rows
from titan_moe.config.job_config import DEGREES, JobConfig
from titan_moe.models.hf import model_of_job
from titan_moe.parallelize.memory import MARGIN
from titan_moe.planner.load import BALANCED
from titan_moe.planner.search import Question, fastest
from titan_moe.runtime.gpus import GPUS


class Row(NamedTuple):
    """A published speed."""

    model: str
    gpus: int
    seq_len: int
    sequences: int
    degrees: dict[str, int]
    tokens: int
    """Tokens a second and GPU."""
    source: str


ROWS = [
    Row("qwen3/30B-A3B", 8, 4096, 512, {"ep": 8}, 12_040, "Automodel"),
    Row("qwen3/30B-A3B", 16, 4096, 1024, {"ep": 16}, 13_011, "Bridge"),
    Row("deepseek_v3/Moonlight-16B-A3B", 16, 4096, 1024, {"ep": 8}, 22_528, "Bridge, natural"),
    Row("gpt_oss/20b", 8, 4096, 256, {"ep": 8}, 13_058, "Automodel"),
    Row("gpt_oss/120b", 64, 4096, 512, {"ep": 64}, 7_626, "Automodel"),
    Row("nemotron_h/30B-A3B", 8, 4096, 512, {"ep": 8}, 16_789, "Automodel"),
    Row("nemotron_h/120B-A12B", 64, 4096, 512, {"ep": 64}, 4_497, "Automodel"),
    Row("qwen3/235B-A22B", 256, 4096, 2048, {"tp": 2, "ep": 8}, 1_862, "ModelZoo"),
    Row("deepseek_v3/671B", 1024, 4096, 16_384, {"pp": 8, "tp": 2, "ep": 64}, 1_061, "Bridge"),
    Row("deepseek_v3/671B", 1024, 4096, 8_192, {"pp": 4, "ep": 64}, 865, "Automodel"),
]


def expected(row: Row) -> float | None:
    """Returns the tokens a second and GPU that are expected; None if nothing fits."""
    family, flavor = row.model.split("/")
    job = JobConfig.model_validate(
        {
            "model": {"name": family, "flavor": flavor, "num_mtp_layers": 0},
            "training": {"seq_len": row.seq_len, "global_batch_size": row.sequences},
            "optimizer": {"state_dtype": "bfloat16"},
        }
    )
    gpu = replace(GPUS["H100"], memory=GPUS["H100"].memory + MARGIN)
    degrees = dict.fromkeys(DEGREES, 1) | row.degrees
    degrees["dp_shard"] = row.gpus // (degrees["pp"] * degrees["tp"])
    question = Question(job, model_of_job(job.model), row.gpus, gpu, BALANCED)
    layout, _ = fastest(question, degrees)
    if layout is None:
        return None
    return row.sequences * row.seq_len / row.gpus / layout.step_seconds


if __name__ == "__main__":
    print("| model | GPUs | degrees | published | expected | ratio | source |")
    print("|---|--:|---|--:|--:|--:|---|")
    for row in ROWS:
        tokens, cut = expected(row), " ".join(f"{axis}={n}" for axis, n in row.degrees.items())
        shown = f"{tokens:,.0f} | {tokens / row.tokens:.2f}" if tokens else "does not fit |"
        words = f"| {row.model} | {row.gpus} | {cut} | {row.tokens:,} | {shown} | {row.source} |"
        print(words, flush=True)
    print(f"\n{memory_rows.table()}")
