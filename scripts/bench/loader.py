"""Tokens per second of the loader alone, on one data rank: no model, nothing to wait for.

python -m scripts.bench.loader

"""

import statistics
import tempfile
import time
from pathlib import Path

from scripts.bench.measure import options, print_table, write_json
from titan_moe.config.job_config import Training
from titan_moe.data.build import build_loader
from titan_moe.data.stdlib import StdlibCorpus
from titan_moe.data.tokenize import tokenize_corpus
from titan_moe.data.tokenizer import load_tokenizer

_GLOBAL_BATCH_SIZE = 16


def main() -> None:
    parser = options(__doc__, repeats=1, seeded=True)
    parser.add_argument("--tokens", type=int, default=5_000_000, help="tokens to read per line")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer("bytes")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "stdlib"
        tokenize_corpus(StdlibCorpus(), tokenizer, copy, progress=lambda documents, tokens: None)
        for dataset, dataset_path in (("stdlib", None), ("synthetic", None), ("tokens", str(copy))):
            for seq_len in (256, 2048):
                training = Training(
                    dataset=dataset, dataset_path=dataset_path, seq_len=seq_len, repeat_dataset=True
                )
                runs = [
                    _measure(training, arguments.seed, num_tokens=arguments.tokens)
                    for _ in range(arguments.repeats)
                ]
                medians = map(statistics.median, zip(*runs, strict=True))
                rows.append([dataset, seq_len, *medians])
    heads = ["dataset", "seq_len", "build s", "first step s", "Mtokens/s"]
    print_table(heads, rows)
    write_json(arguments.json, {"rows": [dict(zip(heads, row, strict=True)) for row in rows]})


def _measure(training: Training, seed: int, *, num_tokens: int) -> tuple[float, float, float]:
    """Seconds to build, seconds of the first step, millions of tokens/s of the steps after it."""
    start = time.perf_counter()
    loader = build_loader(
        training,
        load_tokenizer("bytes"),
        seed=seed,
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
    return built - start, first - built, steps * tokens_per_step / seconds / 1e6


if __name__ == "__main__":
    main()
