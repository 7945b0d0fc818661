"""config init and config schema: start a TOML file, and let editors check it."""

import argparse
import json
import math
from pathlib import Path

from titan_moe.cli.command import Answer, Command, add_out_file, add_ranks, out_file
from titan_moe.config.errors import ConfigError

SCHEMA = "configs/schema.json"


def _init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("family", help="model family, a folder of configs/")
    add_ranks(parser, default=8, says="GPUs of the run; default: 8")
    parser.add_argument("--flavor", help="flavor, if there are several for these GPUs")
    add_out_file(parser, says="the file to write")


def init(options: argparse.Namespace) -> Answer:
    """Start a TOML file from one that comes with titan_moe: of a model family, for some GPUs.

        titan-moe config init qwen3 --ranks 8 --flavor 30B-A3B --out mine.toml

    Takes the file for the number of GPUs that is nearest to --ranks. Prints it, or writes it to
    --out, with a first line by which editors find the schema.

    Exit codes: 0; 1 the file cannot be written; 2 no such configuration, or --out is there already.
    """
    from titan_moe.config.named import CONFIGS

    sized = sorted(CONFIGS.glob("*/*_*gpu.toml"))
    pattern = f"{options.flavor or '*'}_*gpu.toml"
    of_bench = [path for path in sized if path.match(f"bench/{options.family}_{pattern}")]
    of_family = [path for path in sized if path.parent.name == options.family]
    named = [path for path in of_family if path.match(pattern)]
    if not named:
        families = dict.fromkeys(path.parent.name for path in sized)
        flavors = dict.fromkeys(path.stem.rpartition("_")[0] for path in of_family)
        asked = " ".join(filter(None, [options.family, options.flavor]))
        raise ConfigError(
            f"no configuration of {asked}: choose from {', '.join(flavors or families)}"
        )
    nearest = min(
        map(_gpus, named + of_bench), key=lambda gpus: abs(math.log(gpus / options.ranks))
    )
    at_nearest = [path for path in named + of_bench if _gpus(path) == nearest]
    found = [path for path in at_nearest if path in named] or at_nearest
    if len(found) > 1:
        names = (path.stem.rpartition("_")[0] for path in found)
        there = ", ".join(name.removeprefix(f"{options.family}_") for name in names)
        line = f"several configurations of {options.family} for --ranks {nearest}"
        raise ConfigError(f"{line}: choose a --flavor of {there}")
    _, _, rest = found[0].read_text(encoding="utf-8").partition("\n")
    text = f"#:schema {(CONFIGS / 'schema.json').resolve().as_uri()}\n"
    if nearest != options.ranks:
        text += (
            f"# Made for {nearest} GPUs: titan-moe check --config FILE --ranks {options.ranks}.\n"
        )
    text += rest
    with out_file(options) as write:
        write(text)
    return Answer({"toml": text}, [str(options.out or text.rstrip("\n"))])


def _gpus(path: Path) -> int:
    """Returns the number in a name such as 30B-A3B_8gpu.toml."""
    return int(path.stem.rpartition("_")[2].removesuffix("gpu"))


def _schema_arguments(parser: argparse.ArgumentParser) -> None:
    add_out_file(parser, says=f"the file to write (default: {SCHEMA}, always anew)")


def schema(options: argparse.Namespace) -> Answer:
    """Write the JSON schema by which editors complete and check the TOML files.

        titan-moe config schema          to configs/schema.json

    Exit codes: 0; 1 the file cannot be written.
    """
    from titan_moe.config.job_config import JobConfig

    found = JobConfig.model_json_schema()
    if options.out is None:
        options.out, options.force = Path(SCHEMA), True
    if not options.json:
        with out_file(options) as write:
            write(json.dumps(found, indent=2) + "\n")
    return Answer(found, [str(options.out)])


COMMANDS = {"init": Command(init, _init_arguments), "schema": Command(schema, _schema_arguments)}
