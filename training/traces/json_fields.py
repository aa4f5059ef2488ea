"""Fields of JSON records, checked one at a time. It knows no trace format."""

from __future__ import annotations

from trimtab.engine_bridge.errors import TraceError
from trimtab.training.traces.source import JsonObject
from trimtab.training.traces.table import MOST_TOKENS


def json_number(
    record: JsonObject,
    key: str,
    where: str,
    *,
    low: float,
    high: float,
    missing: float | None = None,
) -> float:
    """A finite number of a JSON object.

    Raises:
        TraceError: it is missing (and `missing` is None), no number, or out of [low, high].
    """
    value = record.get(key)
    if value is None and missing is not None:
        return missing
    bound = f"a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise TraceError(where, key=key, value="nothing" if value is None else value, bound=bound)
    return float(value)


def json_integer(
    record: JsonObject, key: str, where: str, *, low: int, high: int = MOST_TOKENS
) -> int:
    """A whole number of a JSON object.

    Raises:
        TraceError: it is missing, no whole number, or out of [low, high].
    """
    value = json_number(record, key, where, low=low, high=high)
    if value != int(value):
        raise TraceError(where, key=key, value=record[key], bound="a whole number")
    return int(value)


def json_ids(record: JsonObject, key: str, where: str) -> list[int]:
    """A list of block ids of a JSON object.

    Raises:
        TraceError: it is no list of whole numbers that fit 63 bits.
    """
    value = record.get(key)
    if not isinstance(value, list):
        raise TraceError(where, key=key, value=type(value).__name__, bound="a list of ids")
    for item in value:
        if type(item) is not int or not -(2**63) <= item < 2**63:
            raise TraceError(where, key=key, value=item, bound="a list of whole numbers")
    return value
