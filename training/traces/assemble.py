"""Grow columns chunk by chunk and put them together as a `Trace`. It reads no files."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.trace import NO_SESSION, Trace

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

_GROWTH = 1.25
_SMALLEST = 1024


class Column:
    """A numpy column that grows in place.

    Growing by a quarter through `ndarray.resize` (which remaps large arrays instead of copying
    them) keeps the peak near the final size; lists of arrays that are joined at the end need twice.
    """

    def __init__(self, dtype: npt.DTypeLike, *, rows: int = 0) -> None:
        """Start empty, with room for `rows` values (a hint)."""
        self._values = np.empty(max(rows, _SMALLEST), dtype)
        self._rows = 0

    def __len__(self) -> int:
        """Number of values so far."""
        return self._rows

    def extend(self, values: npt.ArrayLike) -> None:
        """Append values, cast to the column's type."""
        array = np.asarray(values)
        end = self._rows + len(array)
        if end > len(self._values):
            self._values.resize(max(end, int(len(self._values) * _GROWTH)), refcheck=False)
        self._values[self._rows : end] = array
        self._rows = end

    def finish(self) -> npt.NDArray[Any]:
        """The values; the column must not be extended afterwards."""
        self._values.resize(self._rows, refcheck=False)
        return self._values


class Names:
    """Names in order of appearance, each with its number."""

    def __init__(self, first: tuple[str, ...] = ()) -> None:
        """Start with the given names."""
        self._numbers: dict[str, int] = {name: number for number, name in enumerate(first)}

    def number(self, name: str) -> int:
        """Number of a name, a new one where it is new."""
        return self._numbers.setdefault(name, len(self._numbers))

    @property
    def names(self) -> tuple[str, ...]:
        """All names, by number."""
        return tuple(self._numbers)


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts `T0-2` before `T0-10`."""
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


def sorted_names(
    names: tuple[str, ...], numbers: IntArray, *, fixed: int = 0
) -> tuple[tuple[str, ...], IntArray]:
    """Keep the names in use, in natural order: they do not depend on how a trace was made.

    Args:
        names: Names by number.
        numbers: Column of numbers.
        fixed: So many names stay first, in use or not.

    Returns:
        The new names and the column with the new numbers.
    """
    used = np.zeros(len(names), np.bool_)
    used[numbers] = True
    used[:fixed] = True
    rest = [number for number in range(fixed, len(names)) if used[number]]
    order = [*range(fixed), *sorted(rest, key=lambda number: natural_key(names[number]))]
    if order == list(range(len(names))):
        return names, numbers
    new = np.zeros(len(names), np.int32)
    new[order] = np.arange(len(order), dtype=np.int32)
    return tuple(names[number] for number in order), new[numbers]


def with_sorted_names(trace: Trace) -> Trace:
    """The trace with its tier, tenant and stop names in natural order, unused ones left out."""
    tier_names, tier = sorted_names(trace.tier_names, trace.tier)
    tenant_names, tenant = sorted_names(trace.tenant_names, trace.tenant)
    stop_names, stop = sorted_names(trace.stop_names, trace.stop_reason, fixed=1)
    return replace(
        trace,
        tier_names=tier_names,
        tier=tier,
        tenant_names=tenant_names,
        tenant=tenant,
        stop_names=stop_names,
        stop_reason=stop,
    )


def dense_ids(ids: npt.NDArray[np.integer[Any]]) -> IntArray:
    """Renumber block ids to 0..m-1, keeping their order; dense ids stay as they are.

    Args:
        ids: Any integers, shape (k,).

    Returns:
        Equal where the ids were equal, shape (k,).
    """
    if not len(ids):
        return np.zeros(0, np.int32)
    low, high = int(ids.min()), int(ids.max())
    if low >= 0 and high < 4 * len(ids) + _SMALLEST:
        seen = np.zeros(high + 1, np.bool_)
        seen[ids] = True
        if seen.all():
            return ids.astype(np.int32, copy=False)
        numbers = np.cumsum(seen, dtype=np.int64) - 1
        return numbers.astype(np.int32)[ids]
    return np.unique(ids, return_inverse=True)[1].astype(np.int32).reshape(-1)


def offsets_of(lengths: npt.NDArray[np.integer[Any]]) -> LongArray:
    """CSR offsets of rows with the given lengths, shape (n + 1,)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def arrival_hints(arrival_s: FloatArray, session: IntArray, turn: IntArray) -> FloatArray:
    """Arrival times in which no turn stands before the turn above it in its session.

    Args:
        arrival_s: Arrivals as recorded, shape (n,); only those of first turns are binding.
        session: Session numbers, shape (n,).
        turn: Turns, shape (n,).
    """
    rows = np.flatnonzero(session != NO_SESSION)
    if not len(rows) or not np.any(turn[rows] > 0):
        return arrival_s
    order = rows[np.lexsort((turn[rows], session[rows]))]
    times, rank = np.unique(arrival_s[order], return_inverse=True)
    group = np.cumsum(np.r_[False, np.diff(session[order]) != 0])
    # Ranks, lifted apart by session, so that one running maximum over whole numbers is exact.
    lift = group * np.int64(len(times))
    running = np.maximum.accumulate(rank.reshape(-1) + lift) - lift
    result = arrival_s.copy()
    result[order] = times[running]
    return result


def build_sorted(
    where: str, *, arrival_s: FloatArray, notes: tuple[str, ...] = (), **columns: Any
) -> Trace:
    """Build a trace of rows in any order: sorted by arrival (stable), turns in order.

    Args:
        where: File, for notes and errors.
        arrival_s: Arrivals, seconds, shape (n,); of turns after the first only a hint.
        notes: Notes so far; one is added where rows had to move.
        columns: The other columns and names, as `Trace.build` takes them.

    Raises:
        TraceError: a column is out of bounds, or a session's turns do not count 0, 1, 2, ...
    """
    loops = "session" in columns and "turn" in columns
    session: IntArray = columns.get("session", np.zeros(0, np.int32))
    turn: IntArray = columns.get("turn", np.zeros(0, np.int32))
    hints = arrival_hints(arrival_s, session, turn) if loops else arrival_s
    behind = int(np.count_nonzero(np.diff(hints) < 0))
    if behind and not loops:
        notes = (*notes, f"{where}: {behind:,} rows stood after a later one; sorted by arrival.")
    if not behind and not (loops and _turns_out_of_order(session, turn)):
        trace = Trace.build(arrival_s=hints, notes=notes, **columns)
    else:
        order = np.lexsort((turn, hints)) if loops else np.argsort(hints, kind="stable")
        unsorted = Trace.build(arrival_s=hints[order], notes=notes, **columns)
        trace = replace(unsorted.take(order), arrival_s=unsorted.arrival_s)
    check_turns(trace, where)
    return trace


def _turns_out_of_order(session: IntArray, turn: IntArray) -> bool:
    rows = np.flatnonzero(session != NO_SESSION)
    order = rows[np.argsort(session[rows], kind="stable")]
    same = np.diff(session[order]) == 0
    return bool(np.any(same & (np.diff(turn[order]) < 0)))


def check_turns(trace: Trace, where: str) -> None:
    """Refuse sessions whose turns are not 0, 1, 2, ... in row order.

    Raises:
        TraceError: with the session and the turn.
    """
    rows = np.flatnonzero(trace.session != NO_SESSION)
    stray = (trace.session == NO_SESSION) & (trace.turn != 0)
    if stray.any():
        raise TraceError(
            where,
            key="turn",
            value=int(trace.turn[stray][0]),
            bound="0 in a row without a session",
        )
    if not len(rows):
        return
    order = rows[np.argsort(trace.session[rows], kind="stable")]
    session, turn = trace.session[order], trace.turn[order]
    first = np.r_[True, np.diff(session) != 0]
    start = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    expected = np.arange(len(order)) - start
    bad = turn != expected
    if bad.any():
        at = int(np.argmax(bad))
        raise TraceError(
            where,
            key=f"session {int(session[at])}",
            value=f"turn {int(turn[at])}",
            bound=f"turn {int(expected[at])} (turns count 0, 1, 2, ... in order of arrival)",
        )
