"""Write configs/schema.json, by which editors complete and check the TOML files."""

import json
from pathlib import Path

from titan_moe.config.job_config import JobConfig

SCHEMA = Path(__file__).parent.parent / "configs" / "schema.json"


def schema() -> str:
    """The file's content."""
    return json.dumps(JobConfig.model_json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema(), encoding="utf-8")
