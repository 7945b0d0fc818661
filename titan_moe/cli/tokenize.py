"""Write a tokenised copy of a dataset.

    titan-moe tokenize --out data/tokens --training.dataset json --training.dataset_path 'x/*.jsonl'

It reads training.dataset, training.dataset_path, training.text_column, model.tokenizer_path and
training.parse_special_tokens of the configuration. Train on the copy with
training.dataset="tokens" and training.dataset_path="data/tokens". Run the same command again after
a kill. titan-moe check data/tokens compares checksums.

Exit codes: 0; 1 it failed; 2 a wrong argument; 130 interrupted.
"""

import argparse
import os
from dataclasses import asdict

from titan_moe.cli.command import Answer, Command, add_out, job_of, positive
from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=positive, default=os.cpu_count(), help="tokenizing processes"
    )
    add_out(parser, default=None, says="the folder to write; it must not exist", required=True)


def run(options: argparse.Namespace) -> Answer:
    try:
        return _tokenize(options)
    except OSError as error:
        raise RunError(f"writing {options.out} failed: {error}; mend it and run again") from None


def _tokenize(options: argparse.Namespace) -> Answer:
    from titan_moe.data.corpus import FileCorpus
    from titan_moe.data.sources import open_source, training_sources
    from titan_moe.data.stream import HubStream
    from titan_moe.data.tokenizer import load_tokenizer
    from titan_moe.data.tokens import write_tokens

    job = job_of(options)
    if job.training.blend:
        raise ConfigError("training.blend: tokenize one dataset at a time, training.dataset")
    if job.training.dataset_format == "messages":
        raise ConfigError(
            "training.dataset_format='messages' is not to be tokenized: a copy holds no targets; "
            "train on the conversations themselves"
        )
    (source,) = training_sources(job.training)
    path = job.model.tokenizer_path
    corpus = open_source(source, load_tokenizer(path, job.training), seed=0)
    if not isinstance(corpus, FileCorpus | HubStream):
        raise ConfigError(
            f"{source.name} is not to be tokenized: choose json, parquet, text or a hub dataset"
        )
    written = write_tokens(
        corpus, path, options.out, workers=options.workers, training=job.training
    )
    found = {"folder": str(options.out), **asdict(written)}
    line = "{folder}: {documents:,} documents ({without_text:,} without a text), {tokens:,} tokens"
    return Answer(found, [line.format(**found)])


COMMAND = Command(run, add_arguments, overrides=True, resumable=True)
