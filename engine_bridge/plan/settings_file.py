"""Settings files of other parts, in the form of a plan's: a fault is one line of the part's error.

What is in such a file is the part's own business.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from trimtab.engine_bridge.errors import InputError, PlanError
from trimtab.engine_bridge.plan.faults import plan_error
from trimtab.engine_bridge.plan.yaml_source import Source, read_source

Settings = TypeVar("Settings", bound=BaseModel)


def read_settings_source(path: Path, kind: type[InputError], *, page: str) -> Source:
    """Read a YAML file.

    Args:
        path: The file.
        kind: The part's error.
        page: The page of docs/ that shows such a file.

    Raises:
        InputError: of that kind; it is not there or no YAML.
    """
    try:
        return read_source(path)
    except PlanError as error:
        # What is said of plans would mislead.
        remedy = f"{page} shows one" if "plan" in error.remedy else error.remedy
        raise _of_kind(kind, error, remedy) from None


def checked_settings(
    data: Mapping[str, object], source: Source, model: type[Settings], kind: type[InputError]
) -> Settings:
    """Make settings of what was read.

    Args:
        data: The content.
        source: Where it is from.
        model: What it must be.
        kind: The part's error.

    Raises:
        InputError: of that kind; the content is not in order.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        found = plan_error(error, source, model)
        raise _of_kind(kind, found, found.remedy) from None


def _of_kind(kind: type[InputError], error: PlanError, remedy: str) -> InputError:
    # A fault of a single value has no key below it.
    key = error.key.removesuffix(".")
    return kind(error.where, key=key, value=error.value, bound=error.bound, remedy=remedy)
