"""Read kv-cache-tester's agent sessions (one JSON file each): closed loop, prefix ids, stops.

Sessions carry no absolute time: their starts are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.assemble import (
    Column,
    Names,
    build_sorted,
    dense_ids,
    offsets_of,
    with_sorted_names,
)
from trimtab.training.traces.json_fields import json_ids, json_integer, json_number
from trimtab.training.traces.options import Label, ReadOptions
from trimtab.training.traces.source import JsonObject, json_file
from trimtab.training.traces.table import LONGEST_S

FILE_PATTERNS = ("trace_*.json", "trace_*.json.gz")


@dataclass
class _Turn:
    at_s: float
    """Recorded start, seconds from the session's."""
    served_s: float
    """The original server's time, seconds; 0 where it is not recorded."""
    think_s: float | None
    """Pause before it as recorded; None where it must be taken from the clock."""
    prompt_tokens: int
    output_tokens: int
    stop: str
    chain: int
    """Which conversation of the session it belongs to: 0 the agent's own, else a sub-agent's."""
    ids: list[int]


@dataclass
class _Tally:
    """What was changed, for the notes."""

    sessions: int = 0
    dropped_sessions: int = 0
    cut_sessions: int = 0
    cut_requests: int = 0
    zero_outputs: int = 0
    idle_gaps: int = 0
    subagents: int = 0


@dataclass
class _Columns:
    arrival: Column = field(default_factory=lambda: Column(np.float64))
    prompt: Column = field(default_factory=lambda: Column(np.int32))
    output: Column = field(default_factory=lambda: Column(np.int32))
    session: Column = field(default_factory=lambda: Column(np.int32))
    turn: Column = field(default_factory=lambda: Column(np.int32))
    think: Column = field(default_factory=lambda: Column(np.float64))
    stop: Column = field(default_factory=lambda: Column(np.int32))
    lengths: Column = field(default_factory=lambda: Column(np.int64))
    block: Column = field(default_factory=lambda: Column(np.int32))
    ids: Column = field(default_factory=lambda: Column(np.int32))
    ids_used: int = 0
    stops: Names = field(default_factory=lambda: Names(("",)))


def read_agent_sessions(
    path: Path, rng: np.random.Generator, label: Label, options: ReadOptions
) -> Trace:
    """Read one session, or every `trace_*.json[.gz]` of a directory, each a closed loop.

    Args:
        path: File or directory.
        rng: Draws the sessions' starts.
        label: Tier and tenant of every row.
        options: Context window, cap of the idle gaps, window of the starts.

    Raises:
        TraceError: a file is not a session, or no session fits the context window.
    """
    files = session_files(path) if path.is_dir() else [path]
    columns, tally = _Columns(), _Tally()
    for file in files:
        turns, block_tokens = _session(file, tally)
        turns = _within_context(turns, options.max_context_tokens, tally)
        start_s = float(rng.uniform(0.0, options.session_window_s))
        if not turns:
            continue
        _append(columns, turns, block_tokens, start_s, tally, options.max_idle_s)
        tally.sessions += 1
    if not tally.sessions:
        raise TraceError(
            path.name,
            key="in",
            value=f"all {len(files)} sessions begin above {options.max_context_tokens:,} tokens",
            remedy="raise --max-context-tokens",
        )
    return _build(path.name, columns, label, _notes(path.name, tally, options))


def session_files(folder: Path) -> list[Path]:
    """The session files of a directory, by name."""
    return sorted(file for pattern in FILE_PATTERNS for file in folder.glob(pattern))


def _session(file: Path, tally: _Tally) -> tuple[list[_Turn], int]:
    record = json_file(file)
    block_tokens = json_integer(record, "block_size", file.name, low=1, high=1 << 20)
    requests = record.get("requests")
    if not isinstance(requests, list) or not requests:
        raise TraceError(file.name, key="requests", bound="a list of at least one request")
    turns: list[_Turn] = []
    _flatten(requests, f"{file.name}: requests", 0.0, 0, block_tokens, turns, tally)
    if not turns:
        raise TraceError(file.name, key="requests", bound="a list of at least one request")
    return turns, block_tokens


def _flatten(
    requests: list[object],
    where: str,
    offset_s: float,
    chain: int,
    block_tokens: int,
    turns: list[_Turn],
    tally: _Tally,
) -> None:
    """Append the requests in order; a sub-agent's stand where it was started.

    A sub-agent's own clock starts at 0. Around it the pauses are taken from the session's clock:
    the recorded pause of the request after it includes the sub-agent's run.
    """
    from_clock = chain > 0
    for number, record in enumerate(requests):
        place = f"{where}[{number}]"
        if not isinstance(record, dict):
            raise TraceError(place, value=type(record).__name__, bound="a JSON object")
        if record.get("type") == "subagent":
            nested = record.get("requests")
            if chain or not isinstance(nested, list):
                raise TraceError(place, key="requests", bound="a list of plain requests")
            tally.subagents += 1
            start_s = json_number(record, "t", place, low=0, high=LONGEST_S)
            _flatten(
                nested, f"{place}.requests", start_s, tally.subagents, block_tokens, turns, tally
            )
            from_clock = True
            continue
        turn = _turn(record, place, offset_s, chain, block_tokens, tally)
        if from_clock:
            turn.think_s = None
        from_clock = False
        turns.append(turn)


def _turn(
    record: JsonObject, where: str, offset_s: float, chain: int, block_tokens: int, tally: _Tally
) -> _Turn:
    prompt = json_integer(record, "in", where, low=1)
    output = json_integer(record, "out", where, low=0)
    think = json_number(record, "think_time", where, low=0, high=LONGEST_S, missing=-1.0)
    stop = record.get("stop")
    ids = json_ids(record, "hash_ids", where)
    if any(item < 0 for item in ids):
        raise TraceError(where, key="hash_ids", value=min(ids), bound="ids of at least 0")
    if len(ids) > -(-prompt // block_tokens):
        raise TraceError(
            where,
            key="hash_ids",
            value=f"{len(ids)} ids",
            bound=f"at most one a block of {block_tokens} tokens",
        )
    tally.zero_outputs += output == 0
    return _Turn(
        at_s=offset_s + json_number(record, "t", where, low=0, high=LONGEST_S),
        served_s=json_number(record, "api_time", where, low=0, high=LONGEST_S, missing=0.0),
        think_s=None if think < 0 else think,
        prompt_tokens=prompt,
        output_tokens=max(output, 1),
        stop=stop if isinstance(stop, str) else "",
        chain=chain,
        ids=ids[: prompt // block_tokens],
    )


def _within_context(turns: list[_Turn], max_tokens: int, tally: _Tally) -> list[_Turn]:
    for number, turn in enumerate(turns):
        if turn.prompt_tokens + turn.output_tokens > max_tokens:
            tally.cut_requests += len(turns) - number
            if number:
                tally.cut_sessions += 1
            else:
                tally.dropped_sessions += 1
            return turns[:number]
    return turns


def _append(
    columns: _Columns,
    turns: list[_Turn],
    block_tokens: int,
    start_s: float,
    tally: _Tally,
    max_idle_s: float,
) -> None:
    n = len(turns)
    think = np.zeros(n)
    for number in range(1, n):
        before, turn = turns[number - 1], turns[number]
        clock = max(0.0, turn.at_s - before.at_s - before.served_s)
        think[number] = clock if turn.think_s is None else turn.think_s
    tally.idle_gaps += int(np.count_nonzero(think > max_idle_s))
    think = np.minimum(think, max_idle_s)
    served = np.array([turn.served_s for turn in turns])
    columns.arrival.extend(start_s + np.cumsum(think) + np.r_[0.0, np.cumsum(served)[:-1]])
    columns.prompt.extend([turn.prompt_tokens for turn in turns])
    columns.output.extend([turn.output_tokens for turn in turns])
    columns.session.extend(np.full(n, tally.sessions))
    columns.turn.extend(np.arange(n))
    columns.think.extend(think)
    columns.stop.extend([columns.stops.number(turn.stop) for turn in turns])
    blocks = extended_ids(turns, block_tokens)
    columns.lengths.extend([len(ids) for ids in blocks])
    columns.block.extend([block_tokens if len(ids) else 0 for ids in blocks])
    # Ids mean something only inside their session: every session gets a range of its own.
    flat = dense_ids(np.concatenate(blocks))
    columns.ids.extend(flat + columns.ids_used)
    columns.ids_used += int(flat.max(initial=-1)) + 1


def extended_ids(turns: list[_Turn], block_tokens: int) -> list[npt.NDArray[np.int64]]:
    """Each turn's ids, then those of its answer where the chain's next turn repeats it."""
    own = [np.array(turn.ids, np.int64) for turn in turns]
    result = list(own)
    following: dict[int, int] = {}
    for number in range(len(turns) - 1, -1, -1):
        turn = turns[number]
        later = following.get(turn.chain)
        following[turn.chain] = number
        if later is None:
            continue
        held, after = len(own[number]), own[later]
        if len(after) > held and np.array_equal(after[:held], own[number]):
            blocks = (turn.prompt_tokens + turn.output_tokens) // block_tokens
            result[number] = after[: max(held, min(len(after), blocks))]
    return result


def _notes(name: str, tally: _Tally, options: ReadOptions) -> tuple[str, ...]:
    notes = [
        f"{name}: starts of {tally.sessions:,} sessions drawn over {options.session_window_s:g} s."
    ]
    limit = f"{options.max_context_tokens:,} tokens"
    if tally.cut_sessions:
        notes.append(
            f"{name}: {tally.cut_sessions:,} sessions end before their first request above {limit}."
        )
    if tally.dropped_sessions:
        notes.append(f"{name}: {tally.dropped_sessions:,} sessions begin above {limit}; left out.")
    if tally.cut_requests:
        notes.append(f"{name}: {tally.cut_requests:,} requests left out by that limit.")
    if tally.zero_outputs:
        notes.append(f"{name}: {tally.zero_outputs:,} requests of 0 output tokens count as 1.")
    if tally.idle_gaps:
        notes.append(f"{name}: {tally.idle_gaps:,} pauses cut to {options.max_idle_s:g} s.")
    if tally.subagents:
        notes.append(f"{name}: {tally.subagents:,} sub-agents run inside their session, in order.")
    return tuple(notes)


def _build(name: str, columns: _Columns, label: Label, notes: tuple[str, ...]) -> Trace:
    trace = build_sorted(
        name,
        arrival_s=columns.arrival.finish(),
        prompt_tokens=columns.prompt.finish(),
        output_tokens=columns.output.finish(),
        tier_names=(label.tier,),
        tenant_names=(label.tenant,),
        session=columns.session.finish(),
        turn=columns.turn.finish(),
        think_s=columns.think.finish(),
        stop_reason=columns.stop.finish(),
        stop_names=columns.stops.names,
        prefix_block_tokens=columns.block.finish(),
        prefix_offsets=offsets_of(columns.lengths.finish()),
        prefix_ids=columns.ids.finish(),
        notes=notes,
    )
    return with_sorted_names(trace)
