"""How Hugging Face's `datasets` is called here. Its import takes most of a second."""

import dataclasses
from typing import Any


def import_quietly() -> Any:
    """`datasets` without progress bars and retry notices, which every rank would print."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    huggingface_hub.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return datasets


def no_mixed_types() -> dict[str, Any]:
    """Left alone, `datasets` 5 writes the strings of a column that holds other things too as JSON,
    in quotes, and says nothing."""
    from datasets.packaged_modules.json.json import JsonConfig

    known = {field.name for field in dataclasses.fields(JsonConfig)}
    return {"on_mixed_types": None} if "on_mixed_types" in known else {}


def reason_of(error: BaseException) -> str:
    """The first line of what went wrong underneath."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]
