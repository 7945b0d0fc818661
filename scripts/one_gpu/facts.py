"""Prints as JSON what this machine is: python -m scripts.one_gpu.facts cuda"""

import json
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from scripts.bench.measure import describe
from titan_moe.parallelize.memory import GIB
from titan_moe.runtime.device import describe_device, memory_of

_OPTIONAL = ("torchao", "datasets", "matplotlib", "zstandard", "fla", "flash_attn_interface")


def facts(device: str) -> dict[str, Any]:
    """Returns device, driver and versions."""
    found = {**describe(device), **describe_device(torch.device(device))}
    found |= {"python": platform.python_version(), "cuda": torch.version.cuda}
    try:
        found["triton"] = version("triton")
    except PackageNotFoundError:
        found["triton"] = None
    found["missing"] = [name for name in _OPTIONAL if find_spec(name) is None]
    memory = memory_of(torch.device(device))
    if memory is not None:
        found["memory_gib"] = memory / GIB
    if memory is not None and (tool := shutil.which("nvidia-smi")):
        query = "driver_version,clocks.max.sm,clocks.max.memory,power.limit"
        command = [tool, f"--query-gpu={query}", "--format=csv,noheader"]
        found[query] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return found


if __name__ == "__main__":
    print(json.dumps(facts(sys.argv[1])))
