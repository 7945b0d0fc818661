"""Comparisons whose runs are those of a run_train.sh that takes no time."""

import json
from dataclasses import replace

import torch

from tests.support.paths import DEBUG_CONFIGS
from titan_moe.runtime.device import describe_device
from titan_moe.verify.compare.code_trees import CodeTree
from titan_moe.verify.compare.forecast import Forecast
from titan_moe.verify.compare.launch import Launcher
from titan_moe.verify.compare.run_spec import RunSpec, parse_run_spec
from titan_moe.verify.compare.runner import Runner
from titan_moe.verify.compare.trial import Trial

COMPARE = DEBUG_CONFIGS / "compare.toml"
COMMON = RunSpec(config=COMPARE, overrides=(("training.steps", "6"),))
CAPABILITY = describe_device(torch.device("cpu"))["capability"]

STUB = """#!/usr/bin/env python3
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
keys = {a[2:]: b for a, b in zip(words[::2], words[1::2])}
folder = Path(keys["job.dump_folder"])
with open(Path(__file__).with_name("calls"), "a") as calls:
    print(json.dumps({"folder": folder.name, "ranks": os.environ["NGPU"], **keys}), file=calls)
if keys.get("debug.seed") == "13":
    print("torchrun says much")
    print("error: rank 0: the loss is unlucky")
    sys.exit(1)
if "checkpoint.create_seed_checkpoint" in keys:
    seed = folder / "checkpoint" / "step-0"
    seed.mkdir(parents=True)
    seed.joinpath("weights").write_text("w")
    sys.exit()
seed = int(keys.get("debug.permute_rows", "0")) + int(os.environ["NGPU"]) - 1
factor = float(keys.get("optimizer.lr", "3e-3")) / 3e-3
pinned = "debug.routing_replay" in keys
flips = 1000 if keys.get("model.name") == "mixtral" else 0
factor *= 1.5 if "moe.z_loss_weight" in keys and not pinned else 1
lines = []
for step in range(1, int(keys["training.steps"]) + 1):
    own, pins = (((s * 7919 + step * 104729) % 17 - 8) for s in (seed, 0 if pinned else seed))
    noise = 1 + 1e-6 * (own + flips * pins)
    loss = 5 / step * noise * factor
    seconds = 1.3 if keys.get("activation_checkpoint.mode") == "full" else 1.0
    seconds *= 9 if step == 8 else 1
    costs = {"tokens": 8 * step, "tokens_per_second": 8 / seconds, "memory/peak_gib": seconds}
    lines.append({"step": step, "loss": loss, "grad_norm": loss, "data": step, **costs})
if pinned:
    flips = {"step": 1, "queries": 256, "tokens": {"layers.1": seed}}
    flips["margins"] = {"layers.1": [0.01, 0.25]}
    folder.joinpath("routing_flips.jsonl").write_text(json.dumps(flips) + "\\n")
folder.joinpath("metrics.jsonl").write_text("\\n".join(map(json.dumps, lines)))
if "metrics.log_initial_weights" in keys:
    weights = {"a": "00", "b": keys.get("debug.seed", "0")}
    folder.joinpath("initial_weights.json").write_text(json.dumps(weights))
facts = {"tokens_per_step": 8, "world_size": int(os.environ["NGPU"]), "torch": "2"}
facts |= {"device": "cpu", "capability": CAPABILITY, "code": {"sha256": SHA256}}
folder.joinpath("run.json").write_text(json.dumps(facts))
config = "[job]\\ndescription = 'x'\\n[model]\\nname = 'deepseek_v3'\\n"
folder.joinpath("config.toml").write_text(config)
"""


class Stubbed(Launcher):
    """Every revision is the stub."""

    def code(self, side: RunSpec) -> CodeTree:
        return CodeTree(self.folder.parent / "code", side.revision or "work", side.revision)


def calls(launcher: Launcher) -> list[dict[str, str]]:
    path = launcher.folder.parent / "code" / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trial(candidate: str = "", baseline: str = "", common: RunSpec = COMMON, **changes) -> Trial:
    specs = parse_run_spec(baseline, common), parse_run_spec(candidate, common)
    return replace(Trial("test", *specs, num_control_runs=8), **changes)


def silent(_: str) -> None:
    pass


def num_counted(trial: Trial, launcher: Launcher) -> int:
    """Returns the trainings that are counted beforehand, control runs apart."""
    Runner(trial, launcher, silent).prepare(forecast := Forecast())
    (row,) = forecast.rows()
    return row["trainings"] - row["control runs"]
