"""What every TOML table is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen table that knows its keys and no others."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )
