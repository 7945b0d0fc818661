"""Another model, data set or seed over a folder with checkpoints is refused; others may change."""

import json

import pytest

from titan_moe.checks.run_folder import check_run_folder
from titan_moe.config.job_config import JobConfig

DIMENSIONS = {"dim": 64, "layers": (1, 2)}


def job_of(folder, **tables):
    base = {
        "job": {"dump_folder": str(folder)},
        "model": {"name": "deepseek_v3", "flavor": "2M"},
        "training": {"dataset": "synthetic"},
    }
    for table, keys in tables.items():
        base[table] = base.get(table, {}) | keys
    return JobConfig(**base)


def saved(folder, step=10, *, model_only=False, **tables):
    at = folder / "checkpoint" / f"step-{step}"
    at.mkdir(parents=True)
    job = job_of(folder, **tables).model_dump(mode="json")
    manifest = {"step": step, "model_only": model_only, "job": job, "model": DIMENSIONS}
    (at / "manifest.json").write_text(json.dumps(manifest))
    return at


def check(folder, dimensions=DIMENSIONS, **tables):
    return check_run_folder(job_of(folder, **tables), dimensions)


OTHER = [
    ({"debug": {"seed": 7}}, "debug.seed=7", "0"),
    ({"training": {"dataset": "stdlib"}}, 'training.dataset="stdlib"', '"synthetic"'),
    ({"training": {"text_column": "body"}}, 'training.text_column="body"', '"text"'),
    (
        {"training": {"blend": [{"dataset": "stdlib"}]}},
        'training.blend=[{"dataset": "stdlib", "text_column": null, "weight": 1.0}]',
        "[]",
    ),
]


@pytest.mark.parametrize("enable", [True, False])
@pytest.mark.parametrize(("keys", "new", "old"), OTHER)
def test_other_data_or_another_seed_is_refused(tmp_path, keys, new, old, enable):
    at = saved(tmp_path)
    assert check(tmp_path, **keys, checkpoint={"enable": enable}) == [
        f"{new}, and {at} is of a run with {old}: set it to that, or choose another "
        f"job.dump_folder, where checkpoint.initial_load_path={at} starts from its weights"
    ]
    fresh = {"exclude_from_loading": ["dataloader"]}
    assert check(tmp_path, **keys, checkpoint=fresh) == []


def test_another_model_is_refused(tmp_path):
    at = saved(tmp_path)
    other = {"name": "qwen3", "flavor": "2M"}
    assert check(tmp_path, {"dim": 32}, model=other) == [
        f'model.name="qwen3", and {at} is of a run with "deepseek_v3": set it to that, or choose '
        "another job.dump_folder"
    ]
    assert check(tmp_path, {"dim": 32}, model={"flavor": "16B"})[0].startswith('model.flavor="16B"')
    assert check(tmp_path, model={"flavor": "hf"}) == []  # The same dimensions.
    fresh = {"exclude_from_loading": ["model"]}
    assert check(tmp_path, {"dim": 32}, model=other, checkpoint=fresh) == []


def test_layout_schedule_and_paths_may_change(tmp_path):
    saved(tmp_path)
    assert check(tmp_path) == []
    free = {
        "training": {"steps": 3, "local_batch_size": 1, "dataset_path": "moved"},
        "parallelism": {"tensor_parallel_degree": 2},
        "optimizer": {"lr": 1e-5},
        "lr_scheduler": {"warmup_steps": 1},
        "metrics": {"log_freq": 1},
    }
    assert check(tmp_path, **free) == []
    blend = [{"dataset": "json", "dataset_path": path} for path in ("a", "b")]
    at = saved(tmp_path, 20, training={"blend": blend[:1]})
    assert check(tmp_path, training={"blend": blend[1:]}) == []
    assert check(tmp_path, training={"blend": blend[1:], "dataset": "stdlib"}) == []
    assert str(at) in check(tmp_path, training={"blend": blend})[0]


SPARSE = DIMENSIONS | {"attention": {"indexer": {"num_heads": 1}}}


@pytest.mark.parametrize(
    ("keys", "says", "remedy"),
    [
        ({"optimizer": {"name": "Muon"}}, 'optimizer.name="Muon", and ', "optimizer"),
        ({"optimizer": {"state_dtype": "bfloat16"}}, 'optimizer.state_dtype="bfloat16", ', "opti"),
        ({"training": {"indexer_stage": "dense"}}, 'training.indexer_stage="dense", ', "optimizer"),
        ({"training": {"dtype": "float64"}}, 'training.dtype="float64", and ', ""),
    ],
)
def test_key_that_changes_tensors_is_refused_as_loading_them_would(tmp_path, keys, says, remedy):
    at = saved(tmp_path)
    (line,) = check(tmp_path, SPARSE, **keys, checkpoint={"enable": True})
    assert line.startswith(says) and f"{at} is of a run with" in line
    assert ("begins with fresh states" in line) == bool(remedy)
    fresh = {"enable": True, "exclude_from_loading": ["model", "optimizer"]}
    assert check(tmp_path, SPARSE, **keys, checkpoint=fresh) == []
    assert check(tmp_path, SPARSE, **keys) == [], "nothing is loaded"


def test_depths_of_prediction_are_those_of_the_checkpoint(tmp_path):
    saved(tmp_path)
    deeper, on = DIMENSIONS | {"num_mtp_layers": 1}, {"enable": True}
    (line,) = check(tmp_path, deeper, model={"num_mtp_layers": 1}, checkpoint=on)
    assert line.startswith("model.num_mtp_layers=1, and ") and line.endswith("job.dump_folder")
    assert check(tmp_path, optimizer={"name": "Adam"}, checkpoint={"enable": True}) == []
    assert check(tmp_path, training={"indexer_stage": "dense"}, checkpoint={"enable": True}) == []


def test_newest_checkpoint_or_load_step_is_compared(tmp_path):
    saved(tmp_path, 9, debug={"seed": 5})
    newest = saved(tmp_path, 10)
    assert check(tmp_path) == []
    (line,) = check(tmp_path, debug={"seed": 7})
    assert f"and {newest} is of a run" in line
    assert "step-9" in check(tmp_path, checkpoint={"enable": True, "load_step": 9})[0]
    (tmp_path / "checkpoint" / "step-10" / "manifest.json").write_text("[")
    assert check(tmp_path, debug={"seed": 7}) == []  # Loading says what is wrong with it.
    assert check(tmp_path / "none") == []


def test_initial_weights_go_with_any_data(tmp_path):
    saved(tmp_path, 0, model_only=True)
    assert check(tmp_path, debug={"seed": 7}, training={"dataset": "stdlib"}) == []
    assert len(check(tmp_path, {"dim": 32}, model={"flavor": "16B"})) == 1
    again = {"enable": True, "create_seed_checkpoint": True}
    assert check(tmp_path, {"dim": 32}, model={"flavor": "16B"}, checkpoint=again) == []
