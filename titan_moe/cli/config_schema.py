"""Write the JSON schema by which editors complete and check the TOML files.

    titan-moe config schema          to configs/schema.json

Exit codes: 0; 1 the file cannot be written.
"""

import argparse
import json
from typing import Any

from titan_moe.cli.command import Answer, Command, add_out

SCHEMA = "configs/schema.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_out(parser, default=SCHEMA, says=f"the file to write; default: {SCHEMA}")


def schema() -> dict[str, Any]:
    """Of a whole job."""
    from titan_moe.config.job_config import JobConfig

    return JobConfig.model_json_schema()


def run(options: argparse.Namespace) -> Answer:
    found = schema()
    if not options.json:
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return Answer(found, [str(options.out)])


COMMAND = Command(run, add_arguments)
