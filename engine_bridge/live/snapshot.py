"""What a source of an engine's metrics gives: all figures of one moment, or one clear failure.

Sources differ in where they read (`scrape`, `prometheus`); what is made of a snapshot is
`assemble`'s business.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from trimtab.engine_bridge.errors import TrimtabError


class Unavailable(enum.StrEnum):
    """Why there are no figures; a closed set, fit for a metric's label."""

    UNREACHABLE = "unreachable"
    """Nobody listens, or the connection broke."""
    TIMEOUT = "timeout"
    """No whole answer in time."""
    REFUSED = "refused"
    """An answer with an HTTP status that is no success."""
    MALFORMED = "malformed"
    """An answer that is not in the expected form."""
    NO_DATA = "no_data"
    """A right answer without any of the engine's series: down, not scraped, or another selector."""
    MISSING_SERIES = "missing_series"
    """Some of the series that are needed are not there."""
    OTHER_ENGINE = "other_engine"
    """The figures are those of another engine than the control socket's, or of another start."""


class TelemetryUnavailableError(TrimtabError):
    """There are no figures of the engine now; what was asked for is in the text."""

    def __init__(self, reason: Unavailable, message: str) -> None:
        """Keep the reason for machines beside the line for people, whatever the other side said."""
        self.reason = reason
        folded = " ".join(message.split())
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in folded))


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All figures of one engine at one moment."""

    values: Mapping[str, Mapping[str, float]]
    """By metric, without `trimtab_`, then by the value of its own label (tier, pool, retention
    class); `""` where it has none. NaN is what the engine says for "no data"."""
    delay_s: float
    """Time from when the figures were read off the engine until now, seconds, on the source's own
    clock; 0 for a direct scrape."""
    names: frozenset[str] = frozenset()
    """All names that are there, without `trimtab_`, to say what a missing one may be called now."""


class MetricSource(Protocol):
    """Where an engine's metrics are read; not safe for several threads at once."""

    @property
    def place(self) -> str:
        """Where, for people: the URL without secrets, and the selector."""

    def read(self) -> Snapshot:
        """All figures now. It takes no longer than its time-out, tries once, and caches nothing.

        Raises:
            TelemetryUnavailableError: there are none.
        """

    def close(self) -> None:
        """Give connections back."""
