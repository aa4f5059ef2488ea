"""What every section of a plan has in common, and how its checks report a fault.

It knows no section in particular.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

LARGEST_COUNT: Final = 2**31 - 1
"""Counts above this do not fit the engines' 32-bit columns."""

Fraction = Annotated[float, Field(ge=0, le=1)]
"""A share of a whole."""
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
"""A share of a whole that is not nothing."""
PositiveMs = Annotated[float, Field(gt=0, le=1e9)]
"""A time in milliseconds, at most eleven days."""
Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
"""A whole number of things."""
PositiveCount = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
"""A whole number of things, at least one."""
Text = Annotated[str, Field(max_length=2000)]
"""Words for people."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
"""A name of a tier, pool or class: it becomes a column, a JSON key and a metric label."""


class Section(BaseModel):
    """A part of a plan: immutable, no unknown keys, no silent conversions, no infinities."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def fault(key: str, *, value: object, bound: str, remedy: str = "") -> PydanticCustomError:
    """Describe a contradiction between keys, for a validator to raise.

    Args:
        key: Path of the key to change, below the section whose validator raises.
        value: What the plan says there.
        bound: What would be right.
        remedy: What the user can do about it.

    Returns:
        The exception; `trimtab.engine_bridge.plan.faults` turns it into a `PlanError`.
    """
    context = {"key": key, "value": value, "bound": bound, "remedy": remedy}
    return PydanticCustomError("contradiction", "{key} must be {bound}", context)
