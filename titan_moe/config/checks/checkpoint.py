"""Checkpoints, and the Hugging Face folders that runs start from and end in."""

from titan_moe.config.checks.run import Check, Run


def _checkpoint_enabled(run: Run) -> list[str]:
    checkpoint = run.job.checkpoint
    needing = {
        "create_seed_checkpoint=true": checkpoint.create_seed_checkpoint,
        f"initial_load_path={checkpoint.initial_load_path}": checkpoint.initial_load_path,
        f"load_step={checkpoint.load_step}": checkpoint.load_step != -1,
        "load_only=true": checkpoint.load_only,
        "initial_load_in_hf=true": checkpoint.initial_load_in_hf,
        "last_save_in_hf=true": checkpoint.last_save_in_hf,
    }
    return [
        f"checkpoint.{setting} has no effect without checkpoint.enable=true: set it"
        for setting, is_set in needing.items()
        if is_set and not checkpoint.enable
    ]


def _hugging_face(run: Run) -> list[str]:
    checkpoint, lines = run.job.checkpoint, []
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        lines.append(
            "checkpoint.initial_load_model_only=false: Hugging Face folders hold the model only, "
            "set it to true beside checkpoint.initial_load_in_hf=true"
        )
    if checkpoint.initial_load_in_hf and not (
        checkpoint.initial_load_path or run.job.model.hf_assets_path
    ):
        lines.append(
            "checkpoint.initial_load_in_hf=true needs a folder: set checkpoint.initial_load_path "
            "or model.hf_assets_path"
        )
    if checkpoint.last_save_in_hf and checkpoint.load_only:
        lines.append(
            "checkpoint.last_save_in_hf=true has no effect with checkpoint.load_only=true: choose "
            "one"
        )
    return lines


def _time_limit(run: Run) -> list[str]:
    seconds = run.job.training.max_seconds
    if not seconds or run.job.checkpoint.keeps_state:
        return []
    return [
        f"training.max_seconds={seconds} stops a run with its state saved: set "
        "checkpoint.enable=true and checkpoint.load_only=false"
    ]


def _roll_back(run: Run) -> list[str]:
    """What a run that goes back to its last checkpoint needs, and what does not go with it."""
    job = run.job
    keys = [
        f"training.{key}=roll_back"
        for key, policy in (
            ("on_nonfinite", job.training.on_nonfinite),
            ("on_spike", job.training.on_spike),
        )
        if policy == "roll_back"
    ]
    if not keys:
        return []
    setting, lines = " and ".join(keys), []
    if not job.checkpoint.enable or job.checkpoint.load_only:
        lines.append(
            f"{setting} goes back to the run's last checkpoint: set checkpoint.enable=true and "
            "checkpoint.load_only=false"
        )
    if job.checkpoint.exclude_from_loading:
        excluded = ", ".join(job.checkpoint.exclude_from_loading)
        lines.append(
            f"{setting} goes back to a whole checkpoint, and checkpoint.exclude_from_loading "
            f"leaves out {excluded}: choose stop or skip until the run has been started again "
            "without it"
        )
    if job.stages:
        lines.append(
            f"{setting} may go back to another stage, whose layout and batch the data no longer "
            "has: choose stop or skip, or train without stages"
        )
    traces = {
        "debug.routing_record": job.debug.routing_record,
        "debug.routing_replay": job.debug.routing_replay,
    }
    lines += [
        f"{key}={folder} has the data of every step, and {setting} trains steps again with other "
        "data: choose one"
        for key, folder in traces.items()
        if folder is not None
    ]
    return lines


CHECKS: list[Check] = [_checkpoint_enabled, _hugging_face, _time_limit, _roll_back]
