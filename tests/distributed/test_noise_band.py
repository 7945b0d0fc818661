"""Layouts stay inside the band of harmless repeats, and mistakes do not."""

import pytest

from titan_moe.config.job import JobConfig
from titan_moe.config.load import load_job
from titan_moe.models.registry import model_config
from titan_moe.verify.case import at_depth
from titan_moe.verify.layouts import parse
from titan_moe.verify.noise_band import Band
from titan_moe.verify.noise_mistakes import double_routers, drop_an_expert, enlarge_all
from titan_moe.verify.noise_runs import Run, harmless_runs, train, with_dtype

CONFIG = at_depth(model_config("deepseek_v3", "gate"), 3)
LR = 3e-3


def make_job(dtype: str, steps: int, **changes: dict) -> JobConfig:
    tables = load_job(["--job.config_file", "configs/debug/gate_deepseek_v3.toml"]).model_dump()
    small = {"steps": steps, "global_batch_size": 8, "local_batch_size": 4, "seq_len": 32}
    tables["training"] |= {**small, "max_norm": 1.0}
    tables["optimizer"] |= {"lr": LR}
    tables["lr_scheduler"] |= {"warmup_steps": 3}
    for table, values in changes.items():
        tables[table] |= values
    return with_dtype(JobConfig.model_validate(tables), dtype)


LARGE = {
    "learning rate 2 % off": ({"optimizer": {"lr": 1.02 * LR}}, None),
    "all gradients 2 % too large": ({}, enlarge_all),
}
SMALL = {
    "router's gradient doubled": ({}, double_routers),
    "an expert's gradient dropped": ({}, drop_an_expert),
    "an auxiliary loss dropped": ({"moe": {"sequence_aux_loss_weight": 0.0}}, None),
}
# In bfloat16 the small ones drown: repeats differ by 2e-4 in the loss and 2e-3 in the norm of the
# first step already.
CAUGHT = {"float32": LARGE | SMALL, "bfloat16": LARGE}


def test_a_layout_is_inside_and_a_doubled_gradient_is_not():
    job = make_job("float32", steps=4)
    alone = [run for run in harmless_runs(job, CONFIG, 8) if run.layout.world_size == 1]
    band = Band([train(job, CONFIG, run) for run in alone])
    judgement = band.judge(train(job, CONFIG, Run(parse("dp_shard=2,ep=2"))))
    assert judgement.inside, judgement.line()
    judgement = band.judge(train(job, CONFIG, Run(alter=double_routers)))
    assert judgement.first_outside == 1 and judgement.quantity == "grad_norm", judgement.line()


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layouts_are_inside_and_mistakes_are_not(dtype: str):
    job = make_job(dtype, steps=24)
    band = Band([train(job, CONFIG, run) for run in harmless_runs(job, CONFIG, 12)])
    for layout in ("dp_shard=1", "dp_shard=2,tp=2,ep=4", "cp=2,tp=2,etp=2", "pp=2,dp_shard=2"):
        judgement = band.judge(train(job, CONFIG, Run(parse(layout))))
        assert judgement.inside, judgement.line()
    for bug, (changes, alter) in CAUGHT[dtype].items():
        wrong = train(make_job(dtype, 24, **changes), CONFIG, Run(alter=alter))
        judgement = band.judge(wrong)
        assert not judgement.inside, f"{bug}: {judgement.line()}"
