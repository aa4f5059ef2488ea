"""Finds series in a snapshot under any name that they are known by, and names what is not there.

It makes nothing of the values but checks that they are numbers of the right kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trimtab.engine_bridge.errors import did_you_mean
from trimtab.engine_bridge.live.series import MAY_BE_NAN, OTHER_NAMES, PREFIX, Series
from trimtab.engine_bridge.live.snapshot import Snapshot, TelemetryUnavailableError, Unavailable

_MOST_NAMED = 3


class Lookup:
    """One snapshot's values by the names that the engine gives them."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Take a snapshot."""
        self._snapshot = snapshot
        self.renamed: dict[str, str] = {}
        """Names that were looked for, and the other ones that they were found under."""
        self._missing: list[str] = []

    def find(self, name: str) -> Mapping[str, float] | None:
        """The metric's values by its own label; None if it is there under no known name."""
        for known in (name, *OTHER_NAMES.get(name, ())):
            found = self._snapshot.values.get(known)
            if found is not None:
                if known != name:
                    self.renamed[name] = known
                return found
        return None

    def entries(self, series: Series, names: Sequence[str]) -> tuple[float, ...]:
        """A metric's values in the order of the names, in the field's unit.

        What is missing counts as 0 until `check` refuses it.

        Raises:
            TelemetryUnavailableError: a value is no number, and its NaN says nothing; or negative.
        """
        found = self.find(series.name) or {}
        values = []
        for name in names:
            value = found.get(name)
            if value is None:
                self._missing.append(_shown(series.name, name))
                value = 0.0
            good = 0.0 <= value < math.inf or (value != value and series.field in MAY_BE_NAN)
            if not good:
                raise TelemetryUnavailableError(
                    Unavailable.MALFORMED, f"{_shown(series.name, name)} is {value:g}"
                )
            values.append(value / series.per_field)
        return tuple(values)

    def check(self) -> None:
        """Refuse if anything that was looked for is missing.

        Raises:
            TelemetryUnavailableError: it is, with the name that it may have now.
        """
        if not self._missing:
            return
        first = self._missing[:_MOST_NAMED]
        more = len(self._missing) - len(first)
        text = f"missing: {', '.join(first)}" + (f" and {more} more" if more else "")
        name = first[0].partition("{")[0].removeprefix(PREFIX)
        if name not in self._snapshot.values:
            hint = did_you_mean(PREFIX + name, (PREFIX + n for n in self._snapshot.names))
            text += f"; {hint}" if hint else ""
        raise TelemetryUnavailableError(Unavailable.MISSING_SERIES, text)


def _shown(name: str, entry: str) -> str:
    return f"{PREFIX}{name}" + (f"{{{entry}}}" if entry else "")
