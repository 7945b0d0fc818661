"""Training stages: their order, and what does not go with them. What a stage changes is checked by
the same rules as a job."""

from itertools import pairwise

from titan_moe.config.checks.run import Check, Note, Run
from titan_moe.config.stages import changes, stage_jobs, stage_name


def _order(run: Run) -> list[str]:
    stages = run.job.stages
    return [
        f"stages[{number}].from_step={stage.from_step} must be more than stages[{number - 1}]."
        f"from_step={stages[number - 1].from_step}: name the stages in the order of their steps"
        for number, stage in enumerate(stages)
        if number and stage.from_step <= stages[number - 1].from_step
    ]


def _last_step(run: Run) -> list[str]:
    steps = run.job.training.steps
    return [
        Note(
            f"stages[{number}].from_step={stage.from_step} has no effect: it is beyond "
            f"training.steps={steps}"
        )
        for number, stage in enumerate(run.job.stages)
        if stage.from_step > steps
    ]


def _nothing_changes(run: Run) -> list[str]:
    jobs = [job for _, job in stage_jobs(run.job)]
    return [
        Note(f"{stage_name(run.job, number)} changes nothing of what was before it")
        for number, (before, after) in enumerate(pairwise(jobs))
        if not changes(before, after)
    ]


def _routing_traces(run: Run) -> list[str]:
    debug = run.job.debug
    data = {(s.training.seq_len, s.training.global_batch_size) for _, s in stage_jobs(run.job)}
    named = {"routing_record": debug.routing_record, "routing_replay": debug.routing_replay}
    return [
        f"debug.{key}={folder}: a routing record is of one sequence length and batch; leave it "
        "out, or train without stages that change them"
        for key, folder in named.items()
        if folder is not None and len(data) > 1
    ]


CHECKS: list[Check] = [_order, _last_step, _nothing_changes, _routing_traces]
