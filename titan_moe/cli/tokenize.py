"""Write a memory-mapped, pre-tokenised copy of a dataset.

    titan-moe tokenize --out data/tokens --training.dataset json --training.dataset_path 'x/*.jsonl'
    titan-moe tokenize --verify data/tokens

Of the configuration it takes training.dataset, training.dataset_path, training.text_column,
training.max_bad_documents and model.tokenizer_path.
Train on the copy with training.dataset="tokens" and training.dataset_path="data/tokens". Killed
half-way, the same command goes on where it stopped.

Exit codes: 0; 1 it failed, or a checksum is wrong; 2 a wrong argument; 130 interrupted.
"""

import argparse
import os
from pathlib import Path

from titan_moe.cli.command import Answer, Command, add_out, add_seed, job_of, positive
from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=positive, default=os.cpu_count(), help="tokenizing threads"
    )
    parser.add_argument(
        "--verify", type=Path, metavar="FOLDER", help="check a folder's checksums instead"
    )
    add_seed(parser, default=0, says="of the synthetic dataset")
    add_out(parser, default=None, says="the folder to write; it must not exist yet")


def run(options: argparse.Namespace) -> Answer:
    if (options.out is None) == (options.verify is None):
        raise ConfigError(["name --out FOLDER to write, or --verify FOLDER to check"])
    if options.verify is not None:
        return _verify(options.verify)
    try:
        return _tokenize(options)
    except OSError as error:
        raise RunError(f"writing {options.out} failed: {error}; mend it and run again") from None


def _tokenize(options: argparse.Namespace) -> Answer:
    from tqdm import tqdm

    from titan_moe.data.bad_documents import counted
    from titan_moe.data.documents import Corpus
    from titan_moe.data.sources import open_source
    from titan_moe.data.tokenize import tokenize_corpus
    from titan_moe.data.tokenizer import load_tokenizer

    job = job_of(options)
    if job.training.blend:
        raise ConfigError(["training.blend: tokenize one dataset at a time, training.dataset"])
    tokenizer = load_tokenizer(job.model.tokenizer_path)
    source = open_source(
        job.training.dataset,
        job.training.dataset_path,
        text_column=job.training.text_column,
        key="training.",
        tokenizer=tokenizer.fingerprint,
        seed=options.seed,
        max_bad_documents=job.training.max_bad_documents,
    )
    size = len(source) if isinstance(source, Corpus) else None
    with tqdm(total=size, unit=" documents", unit_scale=True, delay=0.5) as bar:
        tokens = 0

        def progress(num_documents: int, num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
            bar.update(num_documents)

        written, bad = tokenize_corpus(
            source,
            tokenizer,
            options.out,
            progress=progress,
            workers=options.workers,
            max_bad_documents=job.training.max_bad_documents,
        )
    found = {
        "folder": str(options.out),
        "documents": written.documents,
        "tokens": written.tokens,
        "shards": len(written.shards),
        "bad_documents": bad.number,
    }
    line = "{folder}: {documents:,} documents, {tokens:,} tokens, {shards} shard(s)"
    return Answer(found, [line.format(**found), *([counted(bad)] if bad.number else [])])


def _verify(folder: Path) -> Answer:
    from titan_moe.data.tokens import damaged_files

    if damaged := damaged_files(folder):
        raise RunError(f"{folder}: wrong checksum of {', '.join(damaged)}: make the folder anew")
    return Answer({"folder": str(folder), "damaged": []}, [f"{folder}: every checksum is right"])


COMMAND = Command(run, add_arguments, overrides=True, resumable=True)
