"""The traffic of `noisy_neighbour`, and what admission lets through of it: shared, runs nothing.

Two tenants send requests of fixed or even lengths as Poisson processes of their own, so that the
quiet one's arrivals are the same beside every neighbour.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.admission.asked import Asked
from trimtab.engine_bridge.admission.core import Admission, Outcome, Ticket
from trimtab.engine_bridge.admission.memory_ledger import MemoryLedger
from trimtab.engine_bridge.admission.settings import AdmissionSettings
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.trace import Trace
from trimtab.engine_bridge.vllm.identity import Identity

TENANTS: Final = ("quiet", "noisy")
QUIET, NOISY = range(2)
QUIET_PER_S: Final = 1.0
NOISY_PER_S: Final = 32.0
TOKEN_BYTES: Final = 4
"""Bytes of a prompt token in the bodies that admission looks at."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lengths:
    """What one tenant sends: prompts of even lengths between two, and answers of one length."""

    shortest: int
    longest: int
    answer: int

    def __str__(self) -> str:
        """Short, for tables."""
        prompt = f"{self.shortest}"
        if self.longest > self.shortest:
            prompt = "one sentence" if self.longest < 64 else f"{prompt} to {self.longest}"
        return f"{prompt} > {self.answer}"


@dataclass(frozen=True)
class Workload:
    """Both tenants' lengths, and their tiers."""

    quiet: Lengths
    noisy: Lengths
    quiet_tier: str = "T0"
    noisy_tier: str = "T0"

    def __str__(self) -> str:
        """Short, for tables."""
        return f"quiet {self.quiet}, noisy {self.noisy}"

    def trace(self, plan: Plan, *, seed: int, minutes: float, solo: bool = False) -> Trace:
        """Arrivals of so many minutes; `solo` leaves the noisy tenant out."""
        parts = [_arrivals(self.quiet, QUIET_PER_S, [seed, QUIET], 60.0 * minutes)]
        if not solo:
            parts.append(_arrivals(self.noisy, NOISY_PER_S, [seed, NOISY], 60.0 * minutes))
        arrival_s = np.concatenate([at for at, _ in parts])
        tenant = np.repeat(np.arange(len(parts)), [len(at) for at, _ in parts])
        order = np.argsort(arrival_s, kind="stable")
        tier = np.array([plan.tier_index(t) for t in (self.quiet_tier, self.noisy_tier)])
        answer = np.array([self.quiet.answer, self.noisy.answer])
        tenant = tenant[order]
        return Trace.build(
            arrival_s=arrival_s[order],
            tenant=tenant,
            tier=tier[tenant],
            prompt_tokens=np.concatenate([tokens for _, tokens in parts])[order],
            output_tokens=answer[tenant],
            tier_names=plan.tier_names,
            tenant_names=TENANTS,
        )


def _arrivals(
    lengths: Lengths, per_s: float, key: list[int], end_s: float
) -> tuple[Floats, npt.NDArray[np.int64]]:
    rng = np.random.default_rng(key)
    count = int(per_s * end_s + 8.0 * np.sqrt(per_s * end_s)) + 8
    at_s = np.cumsum(rng.exponential(1.0 / per_s, count))
    at_s = at_s[at_s < end_s]
    return at_s, rng.integers(lengths.shortest, lengths.longest + 1, len(at_s))


class Door:
    """The real admission core in virtual time: whom it would let through."""

    def __init__(self, limits: Mapping[str, object], plan: Plan) -> None:
        """Put limits on the noisy tenant alone."""
        settings = AdmissionSettings.model_validate({"tenants": {TENANTS[NOISY]: dict(limits)}})
        self._now_s = 0.0
        limiter = MemoryLedger(lambda: self._now_s)
        self._core = Admission(settings, plan, limiter=limiter, monotonic_s=lambda: self._now_s)
        self._loop = asyncio.new_event_loop()
        self._tickets: dict[int, Ticket] = {}

    def admit(self, trace: Trace, row: int, at_s: float) -> bool:
        """Whether the row may go on to the engine at that time."""
        self._now_s = at_s
        size = TOKEN_BYTES * int(trace.prompt_tokens[row])
        body: dict[str, Any] = {"max_tokens": int(trace.output_tokens[row])}
        asked = Asked(
            identity=Identity(
                trace.tenant_names[trace.tenant[row]], trace.tier_names[trace.tier[row]]
            ),
            path="/v1/completions",
            body=body | {"prompt": "w" * size},
            body_bytes=size,
        )
        judged = self._loop.run_until_complete(self._core.admit(asked))
        if not isinstance(judged, Ticket):
            return False
        self._tickets[row] = judged
        return True

    def ended(self, trace: Trace, row: int, at_s: float) -> None:
        """The row's answer is complete."""
        ticket = self._tickets.pop(row, None)
        if ticket is None:
            return
        self._now_s = at_s
        done = ticket.finished(
            outcome=Outcome.FINISHED,
            prompt_tokens=int(trace.prompt_tokens[row]),
            output_tokens=int(trace.output_tokens[row]),
        )
        self._loop.run_until_complete(done)

    def close(self) -> None:
        """Let go of the loop."""
        self._loop.close()


def admitted(trace: Trace, limits: Mapping[str, object], plan: Plan) -> npt.NDArray[np.bool_]:
    """What limits on rates let through, shape (n,): they do not wait for an engine's answers."""
    door = Door(limits, plan)
    passed = [door.admit(trace, row, float(trace.arrival_s[row])) for row in range(len(trace))]
    door.close()
    return np.array(passed)
