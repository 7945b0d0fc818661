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


CHECKS: list[Check] = [_checkpoint_enabled, _hugging_face, _time_limit]
