"""Turns what pydantic found wrong with a plan into one `PlanError` of one line.

It decides nothing about what is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trimtab.engine_bridge.errors import PlanError, did_you_mean
from trimtab.engine_bridge.plan.yaml_source import Source

_BOUNDS = {
    "missing": "given",
    "extra_forbidden": "a known key",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_unicode": "text",
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
    "literal_error": "one of {expected}",
    "dict_type": "a mapping of names to values",
    "model_type": "a mapping of keys to values",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
    "contradiction": "{bound}",
}
_REMEDIES = {
    "float_type": "write it without quotes",
    "int_type": "write it without quotes, point or exponent",
    "bool_type": "write true or false without quotes",
    "string_type": "put it in quotes",
}


def plan_error(error: ValidationError, source: Source, model: type[BaseModel]) -> PlanError:
    """Describe the fault that most likely explains the others.

    Args:
        error: What pydantic found.
        source: The document, for its name and lines.
        model: The class that was validated, for the names of its keys.
    """
    # A mistyped key is reported twice, as unknown and as missing: the first says how to mend it.
    faults = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    first = faults[0]
    context: dict[str, Any] = dict(first.get("ctx", {}))
    kind = first["type"]
    path = tuple(part for part in first["loc"] if part != "[key]")
    bound = _BOUNDS[kind].format(**context) if kind in _BOUNDS else first["msg"]
    remedy = _REMEDIES.get(kind, "")
    found: dict[str, object] = {} if kind == "missing" else {"value": first["input"]}
    if kind == "contradiction":
        path += tuple(context["key"].split("."))
        found = {"value": context["value"]}
        remedy = context["remedy"]
    elif kind == "extra_forbidden":
        known = tuple(_keys_at(model, path[:-1]))
        remedy = did_you_mean(path[-1], known) or f"known keys: {', '.join(known)}"
        found = {}
    elif kind == "literal_error":
        remedy = _closest_literal(first)
    elif kind == "string_pattern_mismatch":
        bound = "1 to 64 of A-Z a-z 0-9 _ . -, the first a letter or digit"
    return PlanError(
        source.place(path),
        key=".".join(str(part) for part in path),
        bound=bound,
        remedy=remedy,
        **found,
    )


def _closest_literal(error: ErrorDetails) -> str:
    expected = str(error["ctx"]["expected"]).replace(" or ", ", ")
    return did_you_mean(error["input"], (name.strip("'") for name in expected.split(", ")))


def _keys_at(model: type[BaseModel], path: tuple[object, ...]) -> Iterator[str]:
    """Names of the keys that the section at a path may have."""
    section: type[BaseModel] | None = model
    for part in path:
        if section is not None and str(part) in section.model_fields:
            section = _section_in(section.model_fields[str(part)].annotation)
    yield from section.model_fields if section is not None else ()


def _section_in(annotation: object) -> type[BaseModel] | None:
    """The section class inside an annotation such as `dict[str, Tier]` or `Shed | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _section_in(argument)
        if found is not None:
            return found
    return None
