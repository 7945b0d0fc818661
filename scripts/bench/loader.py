"""Tokens per second of the loader alone, on one data rank: no model, nothing to wait for.

python scripts/bench/loader.py
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch  # noqa: F401  Here, so that no first step waits for it.

from titan_moe.config.job_config import Training
from titan_moe.data.build import build_loader
from titan_moe.data.stdlib import StdlibCorpus
from titan_moe.data.tokenize import tokenize_corpus
from titan_moe.data.tokenizer import load_tokenizer

_GLOBAL_BATCH_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=5_000_000, help="tokens to read per line")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer("bytes")
    print(f"{'dataset':<10} {'seq_len':>7} {'build s':>8} {'first step s':>12} {'Mtokens/s':>10}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "stdlib"
        tokenize_corpus(StdlibCorpus(), tokenizer, copy, progress=lambda documents, tokens: None)
        for dataset, dataset_path in (("stdlib", None), ("synthetic", None), ("tokens", str(copy))):
            for seq_len in (256, 2048):
                training = Training(
                    dataset=dataset, dataset_path=dataset_path, seq_len=seq_len, repeat_dataset=True
                )
                build, first, rate = _measure(training, num_tokens=arguments.tokens)
                print(
                    f"{dataset:<10} {seq_len:>7} {build:>8.3f} {first:>12.4f} {rate / 1e6:>10.1f}"
                )


def _measure(training: Training, *, num_tokens: int) -> tuple[float, float, float]:
    """Seconds to build, seconds of the first step, tokens/s of the steps after it."""
    start = time.perf_counter()
    loader = build_loader(
        training,
        load_tokenizer("bytes"),
        seed=0,
        rank=0,
        num_ranks=1,
        global_batch_size=_GLOBAL_BATCH_SIZE,
    )
    built = time.perf_counter()
    loader.next_step()
    first = time.perf_counter()
    tokens_per_step = _GLOBAL_BATCH_SIZE * training.seq_len
    steps = max(1, num_tokens // tokens_per_step)
    for _ in range(steps):
        loader.next_step()
    seconds = time.perf_counter() - first
    loader.close()
    return built - start, first - built, steps * tokens_per_step / seconds


if __name__ == "__main__":
    main()
