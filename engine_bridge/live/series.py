"""The series that an engine's telemetry is made of, and the names under which they may come.

One table, derived from the one that makes them (`vllm.metric_families`). It reads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trimtab.engine_bridge.vllm.metric_families import (
    ALLOCATION_FIELDS,
    ENGINE,
    ENGINE_FIELDS,
    START_ID,
    TIER_FIELDS,
    Field,
)

PREFIX: Final = "trimtab_"
RANK: Final = ENGINE
"""Label with the engine's data-parallel rank."""
OWN_LABELS: Final = ("tier", "pool", "retention_class")
"""Labels that tell the entries of one metric apart."""
HISTOGRAM_ENDS: Final = ("_bucket", "_sum", "_count", "_created")
"""Ends of the names that telemetry has no use for: most lines of a page."""
REPORTED_UNIX_S: Final = "telemetry_timestamp_seconds"
ALLOCATION_VERSION: Final = "allocation_version"
ATTAINED: Final = "attained"
"""Requests that met their targets: no field of telemetry, but the attainment is made of it."""


@dataclass(frozen=True)
class Series:
    """One metric that becomes one field."""

    field: str
    name: str
    """On the page, without the prefix."""
    counter: bool
    per_field: float
    """What a value is divided by, for the field's unit."""


def _series(spec: Field) -> Series:
    counter = spec.kind == "counter"
    return Series(spec.field, f"{spec.name}_total" if counter else spec.name, counter, spec.scale)


TIER_SERIES: Final = (
    *(_series(spec) for spec in TIER_FIELDS if spec.field != "attainment"),
    Series(ATTAINED, f"{ATTAINED}_total", True, 1.0),
)
"""By tier. The attainment of an interval is made of two counters, so that none is lost between two
reads; the gauge is not needed."""
ENGINE_SERIES: Final = tuple(
    _series(spec) for spec in ENGINE_FIELDS if spec.field not in ("interval_s", "age_s")
)
"""Of the engine. Length and age of an interval are those of what was read."""
MAY_BE_NAN: Final = frozenset(
    {
        "ttft_ms_p50",
        "ttft_ms_p99",
        "tpot_ms_p50",
        "tpot_ms_p99",
        "acceptance",
        "step_ms_mean",
        "batch_mean",
    }
)
"""Fields whose NaN says "no data"; any other NaN is a fault."""

_UNITS: Final = ("_seconds", "_ratio")


def _trimmed(name: str) -> tuple[str, ...]:
    """The name as collectors write it that take suffixes away, least trimmed first."""
    found = []
    short = name
    for ends in (("_total",), _UNITS):
        end = next((end for end in ends if short.endswith(end)), None)
        if end is not None:
            short = short.removesuffix(end)
            found.append(short)
    return tuple(found)


_NEEDED: Final = (
    *(series.name for series in (*TIER_SERIES, *ENGINE_SERIES)),
    *(name for _, name, _, _ in ALLOCATION_FIELDS),
    REPORTED_UNIX_S,
    ALLOCATION_VERSION,
)
OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {name: _trimmed(name) for name in _NEEDED}
"""By name, what else it may be called: without the ends for kind and unit, as collectors between
engine and Prometheus write it when they are set to trim suffixes. A metric that is renamed in a
later version gets its former name here."""
WANTED: Final = frozenset((*_NEEDED, START_ID)) | {
    other for others in OTHER_NAMES.values() for other in others
}
"""Every name that a source has to keep."""
