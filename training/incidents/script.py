"""The traffic of an incident as a list of calls, and the trace that they make.

What each incident's traffic is, its own module says. Nothing here is random.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trimtab.engine_bridge.trace import NO_SESSION, Trace

TIERS = ("T0", "T1", "T2", "T3")
ID_TOKENS = 16
"""Tokens that a prefix id stands for: a KV block of every engine that comes with Trimtab."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request of a script."""

    arrival_s: float
    """Seconds from the start; of a later turn only a hint for the order of rows."""
    tier: str
    tenant: str
    prompt_tokens: int
    output_tokens: int
    session: int = NO_SESSION
    turn: int = 0
    think_s: float = 0.0
    """Pause after the last turn's answer, seconds."""
    prefix_ids: Sequence[int] = ()
    acceptance: float = float("nan")
    """Share of the draft model's tokens that are right, in [0, 1]."""


@dataclass
class Names:
    """Numbers of prefix blocks that nobody has used yet."""

    used: int = 0

    def more(self, count: int) -> list[int]:
        """So many new ones."""
        first, self.used = self.used, self.used + count
        return list(range(first, self.used))


@dataclass
class Conversation:
    """A session whose every turn repeats what was said before."""

    number: int
    tier: str
    tenant: str
    names: Names
    start_s: float
    calls: list[Call] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)

    def turn(self, prompt_tokens: int, output_tokens: int, think_s: float) -> None:
        """Add a turn with a prompt of so many tokens in all."""
        whole = (prompt_tokens + output_tokens) // ID_TOKENS
        self._ids += self.names.more(max(0, whole - len(self._ids)))
        self.calls.append(
            Call(
                arrival_s=self.start_s,
                tier=self.tier,
                tenant=self.tenant,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                session=self.number,
                turn=len(self.calls),
                think_s=think_s if self.calls else 0.0,
                prefix_ids=tuple(self._ids),
            )
        )


def poisson_s(rng: np.random.Generator, rate: float, start_s: float, end_s: float) -> list[float]:
    """Times of independent arrivals at so many a second, from start to end."""
    times, at_s = [], start_s
    while (at_s := at_s + float(rng.exponential(1.0 / rate))) < end_s:
        times.append(at_s)
    return times


def trace_of(calls: Iterable[Call]) -> Trace:
    """The trace of these calls, in the order of their times."""
    rows = sorted(calls, key=lambda call: call.arrival_s)
    tenants = tuple(sorted({call.tenant for call in rows}))
    lengths = [len(call.prefix_ids) for call in rows]
    return Trace.build(
        arrival_s=[call.arrival_s for call in rows],
        tier=[TIERS.index(call.tier) for call in rows],
        tenant=[tenants.index(call.tenant) for call in rows],
        prompt_tokens=[call.prompt_tokens for call in rows],
        output_tokens=[call.output_tokens for call in rows],
        tier_names=TIERS,
        tenant_names=tenants,
        session=np.array([call.session for call in rows], np.int32),
        turn=np.array([call.turn for call in rows], np.int32),
        think_s=np.array([call.think_s for call in rows]),
        acceptance=np.array([call.acceptance for call in rows]),
        prefix_offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        prefix_ids=np.array([i for call in rows for i in call.prefix_ids], np.int32),
        prefix_block_tokens=np.where(np.array(lengths) > 0, ID_TOKENS, 0).astype(np.int32),
    )
