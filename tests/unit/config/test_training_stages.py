import pytest

from titan_moe.config.parse import load_job, resolve, save_job
from titan_moe.config.training_stages import job_of_step, tokens_per_step, training_stages

TOML = """
[training]
seq_len = 64
local_batch_size = 2
steps = 100
[parallelism]
tensor_parallel_degree = 2

[[stages]]
from_step = 11
seq_len = 128
[stages.parallelism]
tensor_parallel_degree = 1
context_parallel_degree = 2
context_parallel_rotate_method = "ring"

[[stages]]
from_step = 51
local_batch_size = 1
global_batch_size = 16
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.toml").write_text(TOML)
    return load_job(["--config", str(tmp_path / "job.toml")])


def test_changes_add_up_stage_after_stage(job):
    (one, first), (eleven, second), (fifty_one, third) = training_stages(resolve(job, 4))
    assert (one, eleven, fifty_one) == (1, 11, 51)
    assert first == resolve(job, 4).model_copy(update={"stages": []})
    for stage in (second, third):
        assert stage.stages == [] and stage.model == job.model
        assert stage.training.seq_len == 128
        assert stage.parallelism.tensor_parallel_degree == 1
        assert stage.parallelism.context_parallel_rotate_method == "ring"
    assert (second.training.local_batch_size, third.training.local_batch_size) == (2, 1)
    # The global batch of two data ranks, which the first stage has.
    assert [each.training.global_batch_size for each in (first, second, third)] == [4, 4, 16]


def test_a_step_belongs_to_the_last_stage_that_began(job):
    lengths = {step: job_of_step(job, step).training.seq_len for step in (0, 1, 10, 11, 50, 100)}
    assert lengths == {0: 64, 1: 64, 10: 64, 11: 128, 50: 128, 100: 128}
    assert job_of_step(job, 50).training.global_batch_size == -1
    assert job_of_step(job, 51).training.global_batch_size == 16


def test_tokens_of_a_step_are_named_where_they_change(job):
    tokens = tokens_per_step(resolve(job, 4))
    assert tokens == {1: 4 * 64, 11: 4 * 128, 51: 16 * 128}


def test_a_saved_job_has_its_stages_and_no_key_that_they_leave_alone(job, tmp_path):
    save_job(job, tmp_path / "saved.toml")
    saved = load_job(["--config", str(tmp_path / "saved.toml")])
    assert saved == job
    assert training_stages(saved) == training_stages(job)
    (stage, _), (again, _) = job.stages, saved.stages
    assert again.parallelism.model_fields_set == stage.parallelism.model_fields_set
    assert len(stage.parallelism.model_fields_set) == 3


def test_stages_of_the_command_line_replace_those_of_the_file(job, tmp_path):
    text = '[{"from_step": 5, "parallelism": {"expert_parallel_degree": 2}}]'
    (stage,) = load_job(["--config", str(tmp_path / "job.toml"), "--stages", text]).stages
    assert stage.from_step == 5
    assert stage.parallelism.model_fields_set == {"expert_parallel_degree"}
