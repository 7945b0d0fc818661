"""Write a memory-mapped, pre-tokenised copy of a dataset.

    python scripts/tokenize_data.py --dataset json --dataset_path 'data/*.jsonl' --out data/tokens

Train on it with training.dataset="tokens" and training.dataset_path="data/tokens". Killed half-way,
the same command goes on where it stopped.
"""

import argparse
import os
import sys
from pathlib import Path

from tqdm import tqdm

from titan_moe.config.errors import ConfigError
from titan_moe.data.documents import Corpus
from titan_moe.data.sources import open_source
from titan_moe.data.tokenize import tokenize_corpus
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.data.tokens import damaged_files
from titan_moe.runtime.errors import RunError


def main() -> int:
    """Exit codes: 0 done, 1 a run error, 2 a wrong argument, 130 stopped by Ctrl-C."""
    arguments = _parse()
    try:
        if arguments.verify:
            _verify(Path(arguments.verify))
        else:
            _tokenize(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"writing {arguments.out!r} failed: {error}; mend it and run again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="stdlib", help="as training.dataset")
    parser.add_argument("--dataset_path", help="as training.dataset_path")
    parser.add_argument("--tokenizer_path", default="bytes", help="as model.tokenizer_path")
    parser.add_argument("--seed", type=int, default=0, help="seed of the synthetic dataset")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="tokenizing threads")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", help="the folder to write; it must not exist yet")
    action.add_argument("--verify", metavar="FOLDER", help="check a folder's checksums instead")
    return parser.parse_args()


def _tokenize(arguments: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(arguments.tokenizer_path)
    source = open_source(
        arguments.dataset,
        arguments.dataset_path,
        key="--",
        tokenizer=tokenizer.fingerprint,
        seed=arguments.seed,
    )
    size = len(source) if isinstance(source, Corpus) else None
    with tqdm(total=size, unit=" documents", unit_scale=True, delay=0.5) as bar:
        tokens = 0

        def progress(num_documents: int, num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
            bar.update(num_documents)

        manifest = tokenize_corpus(
            source, tokenizer, Path(arguments.out), progress=progress, workers=arguments.workers
        )
    print(
        f"{arguments.out}: {manifest.documents:,} documents, {manifest.tokens:,} tokens, "
        f"{len(manifest.shards)} shard(s)"
    )


def _verify(folder: Path) -> None:
    if damaged := damaged_files(folder):
        raise RunError(f"{folder}: wrong checksum of {', '.join(damaged)}: make the folder anew")
    print(f"{folder}: every checksum is right")


if __name__ == "__main__":
    sys.exit(main())
