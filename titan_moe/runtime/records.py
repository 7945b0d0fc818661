"""Records read from files of JSON: what of one does not fit, in words."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class StrictRecord(BaseModel):
    """Of JSON's own types: a number in quotes is no number, nor is a truth value."""

    model_config = ConfigDict(strict=True)


def first_problem(error: ValidationError, prefix: str = "") -> str:
    """Key and trouble of the first value that does not fit."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    key = ".".join(part for part in (prefix, *map(str, first["loc"])) if part)
    return f"{ascii(key)[1:-1][:200]}: {first['msg']}"
