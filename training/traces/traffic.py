"""Synthetic requests of each kind: chats, agents, single calls. It decides no rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.media import MediaItems
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.assemble import build_sorted, dense_ids, offsets_of
from trimtab.training.traces.lengths import Lognormal
from trimtab.training.traces.media_build import carried
from trimtab.training.traces.media_mix import MediaMix

FloatArray = npt.NDArray[np.float64]
LongArray = npt.NDArray[np.int64]

BLOCK_TOKENS: Final = 64
"""Tokens of a prefix block of synthetic sessions, as in the public agent sessions."""
_STOPS = ("", "end_turn", "tool_use")
_TOKEN_S = 0.025
_SHORTEST_THINK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class SessionKind:
    """How the sessions of a tier behave."""

    tenants: int
    system: Lognormal
    """Tokens that all sessions of a tenant begin with."""
    first: Lognormal
    """New prompt tokens of the first turn."""
    later: Lognormal
    """New prompt tokens of a later turn: a message or a tool's result."""
    output: Lognormal
    turns_mean: float
    most_turns: int
    human_pause: Lognormal
    tool_pause: Lognormal
    tool_fraction: float
    """Share of turns that end in a tool call."""
    max_context_tokens: int


@dataclass(frozen=True, kw_only=True)
class Brought:
    """The media that turns bring."""

    mix: MediaMix
    share: float
    """Part of the turns that brings any."""
    rng: np.random.Generator
    """Draws them, apart from all else: the texts stay as they are without media."""


@dataclass(frozen=True, kw_only=True)
class SingleKind:
    """How the single requests of a tier behave."""

    tenants: int
    prompt: Lognormal
    output: Lognormal


def owners(count: int, tenants: int, rng: np.random.Generator) -> LongArray:
    """Who asks: tenants with shares in proportion to 1 / rank, shape (count,)."""
    weights = 1.0 / np.arange(1, tenants + 1)
    return rng.choice(tenants, size=count, p=weights / weights.sum())


def tenant_names(tier: str, tenants: int) -> tuple[str, ...]:
    """Names `T0-01`, `T0-02`, ..."""
    digits = len(str(tenants))
    return tuple(f"{tier}-{rank:0{digits}d}" for rank in range(1, tenants + 1))


def single_requests(
    tier: str, arrival_s: FloatArray, kind: SingleKind, rng: np.random.Generator
) -> Trace:
    """Requests that belong to no session."""
    n = len(arrival_s)
    return Trace.build(
        arrival_s=arrival_s,
        prompt_tokens=kind.prompt.tokens(n, rng),
        output_tokens=kind.output.tokens(n, rng),
        tenant=owners(n, kind.tenants, rng),
        tier_names=(tier,),
        tenant_names=tenant_names(tier, kind.tenants),
    )


def sessions(
    tier: str,
    start_s: FloatArray,
    kind: SessionKind,
    rng: np.random.Generator,
    *,
    span_s: float,
    media: Brought | None = None,
) -> Trace:
    """Closed-loop sessions whose prompts repeat all that was said and shown before.

    What a turn shows stands before what it says.

    Args:
        tier: Tier of every row.
        start_s: Start of each session, seconds; below 0 it joins in its middle.
        kind: How they behave.
        rng: Draws everything.
        span_s: Turns that would arrive later than this are left out, seconds.
        media: What the turns show; None: nothing.
    """
    turns = np.minimum(rng.geometric(1.0 / kind.turns_mean, len(start_s)), kind.most_turns)
    owner = owners(len(start_s), kind.tenants, rng)
    system = kind.system.tokens(kind.tenants, rng)
    session = np.repeat(np.arange(len(start_s)), turns)
    first_row = offsets_of(turns)[:-1][session]
    turn = np.arange(len(session)) - first_row
    n = len(session)
    new = np.where(turn == 0, kind.first.tokens(n, rng), kind.later.tokens(n, rng))
    shown = None if media is None else _Shown.of(n, media)
    if shown is not None:
        new = new + shown.by_turn
    output = kind.output.tokens(n, rng)
    tool = rng.random(n) < kind.tool_fraction
    # What pauses is decided by how the turn before it ended.
    after_tool = np.r_[False, tool[:-1]]
    pause = np.where(after_tool, kind.tool_pause.draw(n, rng), kind.human_pause.draw(n, rng))
    think = np.where(turn == 0, 0.0, np.maximum(pause, _SHORTEST_THINK_S))
    prompt = system[owner[session]] + _within(new + np.r_[0, output[:-1]] * (turn > 0), first_row)
    served = np.r_[0.0, output[:-1] * _TOKEN_S] * (turn > 0)
    arrival = start_s[session] + _within(think + served, first_row)
    keep = (arrival >= 0) & (arrival < span_s)
    # The context only grows, so that what is kept of a session is one stretch of turns.
    keep &= prompt + output <= kind.max_context_tokens
    rows = np.flatnonzero(keep)
    columns: dict[str, Any] = {
        "prompt_tokens": prompt[rows].astype(np.int32),
        "output_tokens": output[rows].astype(np.int32),
        "tenant": owner[session[rows]].astype(np.int32),
        "stop_reason": np.where(tool[rows], 2, 1).astype(np.int32),
    }
    if shown is not None:
        columns["media"] = shown.items(prompt - new, first_row).take(rows)
    columns |= _renumbered(session[rows], think[rows])
    columns |= _prefixes(columns, system)
    return build_sorted(
        "generated trace",
        arrival_s=arrival[rows],
        tier_names=(tier,),
        tenant_names=tenant_names(tier, kind.tenants),
        stop_names=_STOPS,
        **columns,
    )


@dataclass(frozen=True)
class _Shown:
    """The media that n turns bring."""

    counts: LongArray
    kind: LongArray
    tokens: LongArray

    @classmethod
    def of(cls, turns: int, media: Brought) -> _Shown:
        return cls(*media.mix.draw(turns, media.share, media.rng))

    @property
    def by_turn(self) -> LongArray:
        """Tokens of all that each turn brings, shape (n,)."""
        turn = np.repeat(np.arange(len(self.counts)), self.counts)
        sums = np.bincount(turn, weights=self.tokens, minlength=len(self.counts))
        return sums.astype(np.int64)

    def items(self, begin_tokens: LongArray, first_row: LongArray) -> MediaItems:
        """All that each turn's prompt holds; `begin_tokens`: where what it adds begins, (n,)."""
        before = np.cumsum(self.tokens) - self.tokens
        first = np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        start = np.repeat(begin_tokens, self.counts) + before - before[first]
        return carried(self.counts, first_row, start, self.kind, self.tokens)


def _within(values: npt.NDArray[Any], first_row: LongArray) -> npt.NDArray[Any]:
    """Running sums that begin anew in every session."""
    if not len(values):
        return values
    total = np.cumsum(values)
    return total - total[first_row] + values[first_row]


def _renumbered(session: LongArray, think_s: FloatArray) -> dict[str, Any]:
    """Sessions and turns counted from 0 after rows were left out."""
    begins = np.r_[True, np.diff(session) != 0] if len(session) else np.zeros(0, np.bool_)
    number = np.cumsum(begins) - 1
    starts = np.flatnonzero(begins)
    turn = np.arange(len(session)) - starts[number] if len(session) else number
    return {
        "session": number.astype(np.int32),
        "turn": turn.astype(np.int32),
        "think_s": np.where(turn == 0, 0.0, think_s),
    }


def _prefixes(columns: dict[str, Any], system_tokens: LongArray) -> dict[str, Any]:
    """Block ids: a tenant's system prompt is common to its sessions, the rest is a session's own.

    A turn that has a next one also names its answer's blocks, because that one repeats them.
    """
    prompt, output = columns["prompt_tokens"], columns["output_tokens"]
    session, tenant = columns["session"].astype(np.int64), columns["tenant"]
    last = np.r_[np.diff(session) != 0, True][: len(session)]
    blocks = np.where(last, prompt, prompt + output).astype(np.int64) // BLOCK_TOKENS
    common = (system_tokens // BLOCK_TOKENS)[tenant]
    offsets = offsets_of(blocks)
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], blocks)
    width = int(max(blocks.max(initial=0), (system_tokens // BLOCK_TOKENS).max(initial=0))) + 1
    tenants = len(system_tokens)
    own = np.repeat(tenants + session, blocks) * width + place
    shared = np.repeat(tenant.astype(np.int64), blocks) * width + place
    ids = np.where(place < np.repeat(common, blocks), shared, own)
    return {
        "prefix_offsets": offsets,
        "prefix_ids": dense_ids(ids),
        "prefix_block_tokens": np.where(blocks > 0, BLOCK_TOKENS, 0).astype(np.int32),
    }
