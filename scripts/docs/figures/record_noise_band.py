"""Measure what the noise band's figure shows, and keep it: docs/figures/noise_band.json.

    python -m scripts.docs.figures.record_noise_band

Trains the small DeepSeek-V3 of scripts/bench/noise_band.py in bfloat16, 50 steps at a time: 16
control runs, one more that the band has not seen, and one whose warm-up is a step longer.
"""

import json
from datetime import datetime, timezone
from pathlib import Path

import torch

from scripts.bench.noise_band import CONFIG, FIRST_UNSEEN, base_job
from titan_moe.runtime.revision import running_code
from titan_moe.verify.compare.noise.mistakes import MISTAKES
from titan_moe.verify.compare.noise.runs import Run, control_runs, train_each

CONTROLS = 16
MISTAKE = "warm-up one step longer"
OTHERS = ("beta2 0.99 instead of 0.95", "learning rate 2 % off")
RECORD = Path(__file__).parents[3] / "docs" / "figures" / "noise_band.json"


def main() -> None:
    job = base_job("bfloat16")
    # The controls, the unseen one, the mistaken one.
    controls = control_runs(job, CONFIG, CONTROLS, most_ranks=1)
    unseen = control_runs(job, CONFIG, 1, first=FIRST_UNSEEN, most_ranks=1)
    mistaken = [(MISTAKES[m].job(job), Run(order=FIRST_UNSEEN)) for m in (MISTAKE, *OTHERS)]
    trainings = [*((job, run) for run in [*controls, *unseen]), *mistaken]
    curves = train_each(trainings, CONFIG, parameter_norms=False)
    losses = [curve.scalars["loss"].tolist() for curve in curves]
    found = {
        "command": "python -m scripts.docs.figures.record_noise_band",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": str(running_code().get("commit", "unknown"))[:7],
        "torch": torch.__version__,
        "controls": losses[:CONTROLS],
        "unseen": losses[CONTROLS],
        "mistaken": losses[CONTROLS + 1],
        "others": losses[CONTROLS + 2 :],
    }
    lines = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in found.items())
    RECORD.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
