"""Replays a trace on a fleet: arrivals, the gateway's choice, engines that come and go.

The routing is the gateway's own (`gateway.routing`); what it does with requests when an engine ends
is as in `gateway.proxy`: who has had no first token yet is sent to another engine, who has is lost.
Engines run side by side in virtual time; a request's end is seen `_QUANTUM_S` later at most where
no pause in the traffic is shorter. An engine that ends finishes the step that it is in.
Long prompts go in slices where the plan says so (`whatif.slicing`): an engine gets those that it is
not believed to have read, a request that is sent on gets others on the next engine.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trimtab.agents.policy import Policy
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.gateway.routing import Affinity, Routes, choose
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.member import Ended, Member
from trimtab.engine_bridge.trace import NO_SESSION, Trace
from trimtab.envs import score
from trimtab.training.fleet.settings import MODEL, Failure, Fleet
from trimtab.training.fleet.store import SharedStore
from trimtab.training.whatif.drafting import with_draft_lengths
from trimtab.training.whatif.slicing import Sliced, in_slices

Columns = dict[str, npt.NDArray[np.generic]]

LOST: Final = 5
"""Outcome of a request that was being answered when its engine ended."""
_QUANTUM_S: Final = 0.05
_ARRIVE, _FAIL, _START, _UP, _GIVE_UP = range(5)


@dataclass(frozen=True, kw_only=True)
class FleetRun:
    """What became of every request, and of the engines."""

    requests: Columns
    """As `ReplayResult.requests`, with `engine`, the engine's index or -1, and outcome `LOST`."""
    engines: tuple[str, ...]
    up_s: dict[str, float]
    """Time for which each engine was paid for, seconds."""
    busy_s: dict[str, float]
    end_s: float
    """When the last request was over, or the drain."""
    retried: int
    """Requests that were sent to another engine because theirs ended."""
    loaded_tokens: int
    """Tokens loaded from the shared store instead of computed."""


@dataclass
class _Seat:
    """An engine's place in the fleet, whether or not one runs there."""

    name: str
    spec: EngineSpec
    sliced: Sliced
    """The traffic as it would come to this engine."""
    member: Member | None = None
    paid_since_s: float | None = None
    paid_s: float = 0.0
    busy_s: float = 0.0
    failed: bool = False
    """It has ended and is not to be started yet."""
    number: int = -1
    """Of the engine that runs there, counted over all that ever ran."""
    starts: int = 0
    """Times that it was started: a start that failed on the way is not the next one's."""
    read_slices: npt.NDArray[np.int32] | None = None
    """What the gateway believes it to have read when it last ended; None: it never has."""


class FleetReplay:
    """One fleet, one trace, one policy on each engine."""

    def __init__(
        self,
        trace: Trace,
        fleet: Fleet,
        plan: Plan,
        specs: Mapping[str, EngineSpec],
        make_policy: Callable[[], Policy],
        *,
        seed: int = 0,
        drain_s: float = 600.0,
    ) -> None:
        """Set the fleet up before the first arrival.

        Args:
            trace: The traffic.
            fleet: The engines and how requests find them.
            plan: Of every engine.
            specs: By engine of the fleet.
            make_policy: Makes one engine's policy.
            seed: Of the policies.
            drain_s: Longest time after the last arrival, seconds.
        """
        self._trace, self._fleet, self._plan, self._seed = trace, fleet, plan, seed
        self._make_policy = make_policy
        self._plans = {name: with_draft_lengths(plan, spec) for name, spec in specs.items()}
        self._limit_s = trace.duration_s + drain_s
        top = max(plan.tiers, key=lambda name: plan.tiers[name].weight)
        self._routes = Routes(
            fleet.facts(), drafts=fleet.drafts, reserve_tiers=fleet.reserve_tiers or (top,)
        )
        self._affinity = Affinity(
            most_over_mean=fleet.routing.most_over_mean,
            slack_requests=fleet.routing.slack_requests,
        )
        self._seats = _seats(trace, plan, {name: specs[name] for name in fleet.engines})
        self._store = self._shared(specs)
        self._keys = [self._key(row) for row in range(len(trace))]
        self._successor, later = _turns(trace)
        n = len(trace)
        self._arrived_s = np.full(n, np.nan)
        self._place = np.full(n, -1, np.int64)
        self._served_by = np.full(n, -1, np.int64)
        self._failed_on: dict[int, set[str]] = {}
        self._numbers = itertools.count()
        self._columns: Columns = {}
        self._last_s = 0.0
        self._outcome = np.full(n, score.UNFINISHED, np.int8)
        self._waiting: dict[int, float] = {}
        self._retried = 0
        self._left = n
        self._events: list[tuple[float, int, int, Any]] = []
        self._order = itertools.count()
        for row in np.flatnonzero(~later).tolist():
            self._push(float(trace.arrival_s[row]), _ARRIVE, row)
        for failure in fleet.failures:
            self._push(failure.at_s, _FAIL, failure)
        pauses = trace.think_s[later]
        self._quantum_s = max(_QUANTUM_S, float(pauses.min())) if len(pauses) else np.inf
        for name, engine in fleet.engines.items():
            if engine.warm:
                self._up(name, 0.0)

    def run(self) -> FleetRun:
        """Run until every request is over, or the drain is."""
        now_s = 0.0
        while self._left and now_s < self._limit_s:
            due_s = self._events[0][0] if self._events else np.inf
            now_s = min(max(due_s, now_s), now_s + self._quantum_s, self._limit_s)
            for seat in self._seats.values():
                if seat.member is not None:
                    for ended in seat.member.run_until(now_s):
                        self._ended(ended, seat)
            while self._events and self._events[0][0] <= now_s:
                at_s, _, kind, what = heapq.heappop(self._events)
                self._handle(kind, what, at_s)
        return self._result(now_s if self._left else self._last_s)

    def _handle(self, kind: int, what: Any, at_s: float) -> None:
        if kind == _ARRIVE:
            self._arrived_s[what] = at_s
            self._send(what, at_s)
        elif kind == _FAIL:
            self._fail(what, at_s)
        elif kind == _START:
            self._seats[what].failed = False
            self._begin(what, at_s)
        elif kind == _UP:
            name, start = what
            if self._seats[name].starts == start:
                self._up(name, at_s)
        elif self._waiting.get(what, np.inf) <= at_s:
            del self._waiting[what]
            self._finish(what, score.REFUSED, at_s)

    def _push(self, at_s: float, kind: int, what: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), kind, what))

    def _send(self, row: int, at_s: float) -> None:
        """Find an engine for a request as the gateway does, or let it wait."""
        trace = self._trace
        tier = trace.tier_names[trace.tier[row]]
        pool = self._routes.pool(MODEL, trace.tenant_names[trace.tenant[row]], tier)
        name = choose(
            pool,
            self._keys[row],
            usable=lambda name: self._seats[name].member is not None,
            in_flight=self._in_flight,
            affinity=self._affinity,
        )
        if name is not None:
            self._offer(row, name, at_s)
            return
        if not pool.groups:
            self._finish(row, score.REFUSED, at_s)
            return
        if row not in self._waiting:
            self._waiting[row] = at_s + self._fleet.wait_s
            self._push(self._waiting[row], _GIVE_UP, row)
        if any(self._seats[name].paid_since_s is not None for name in pool.names):
            return
        for cold in pool.names:
            if not self._fleet.engines[cold].warm and not self._seats[cold].failed:
                self._begin(cold, at_s)
                break

    def _in_flight(self, name: str) -> int:
        member = self._seats[name].member
        return 0 if member is None else member.in_flight

    def _offer(self, row: int, name: str, at_s: float) -> None:
        seat = self._seats[name]
        assert seat.member is not None
        self._waiting.pop(row, None)
        self._place[row] = list(self._seats).index(name)
        self._served_by[row] = seat.number
        own = int(seat.sliced.last[row])
        if self._store is not None:
            size = seat.spec.block_size
            wait_s = self._store.load_s(row, seat.member.cached_blocks(own) * size)
            if wait_s > 0:
                seat.member.fill(own, self._store.held_tokens(row) // size)
                at_s += wait_s
        again = name in self._failed_on.get(row, ())
        seat.member.offer(own if again else int(seat.sliced.first[row]), at_s)

    def _ended(self, ended: Ended, seat: _Seat) -> None:
        row = int(seat.sliced.request[ended.row])
        if self._store is not None and ended.outcome == score.FINISHED:
            tokens = self._trace.prompt_tokens[row] + self._trace.output_tokens[row]
            self._store.keep(row, int(tokens))
        self._finish(row, ended.outcome, ended.at_s)

    def _finish(self, row: int, outcome: int, at_s: float) -> None:
        self._outcome[row] = outcome
        self._last_s = max(self._last_s, at_s)
        self._left -= 1
        later = self._successor.get(row)
        if later is not None:
            self._push(at_s + float(self._trace.think_s[later]), _ARRIVE, later)

    def _begin(self, name: str, at_s: float) -> None:
        """Start an engine: it is paid for from now on, and serves later."""
        seat = self._seats[name]
        if seat.paid_since_s is None:
            seat.paid_since_s = at_s
            seat.starts += 1
            self._push(at_s + self._fleet.engines[name].start_s, _UP, (name, seat.starts))

    def _up(self, name: str, at_s: float) -> None:
        """An engine serves, its cache empty; who waits is looked at again."""
        seat, policy, plan = self._seats[name], self._make_policy(), self._plans[name]
        policy.reset(plan, self._seed)
        seat.paid_since_s = at_s if seat.paid_since_s is None else seat.paid_since_s
        seat.number = next(self._numbers)
        seat.member = Member(
            seat.sliced.trace,
            plan,
            seat.spec,
            rules=policy.engine_rules,
            control=policy.act,
            start_s=at_s,
        )
        if seat.read_slices is not None:
            seat.member.read_slices = seat.read_slices
        for row in sorted(self._waiting, key=lambda row: (self._arrived_s[row], row)):
            self._send(row, at_s)

    def _fail(self, failure: Failure, at_s: float) -> None:
        """An engine ends, running or starting: its requests are sent elsewhere, or lost."""
        seat = self._seats[failure.engine]
        if seat.paid_since_s is None:
            return
        gone, seat.member = seat.member, None
        seat.failed = True
        seat.starts += 1
        self._stop_paying(seat, at_s)
        self._push(at_s + failure.down_s, _START, failure.engine)
        if gone is None:
            return
        self._take(seat, gone)
        # The gateway learns only from its answers that an engine has forgotten everything.
        seat.read_slices = gone.read_slices
        for there, answering in gone.unfinished().items():
            row = int(seat.sliced.request[there])
            self._failed_on.setdefault(row, set()).add(seat.name)
            if answering:
                self._finish(row, LOST, at_s)
            else:
                self._retried += 1
                self._place[row] = self._served_by[row] = -1
                self._send(row, at_s)

    def _stop_paying(self, seat: _Seat, at_s: float) -> None:
        if seat.paid_since_s is not None:
            seat.paid_s += at_s - seat.paid_since_s
            seat.paid_since_s = None

    def _shared(self, specs: Mapping[str, EngineSpec]) -> SharedStore | None:
        if self._fleet.store is None:
            return None
        spec = next(iter(specs.values()))
        return SharedStore(
            self._fleet.store,
            self._trace,
            block_tokens=spec.block_size,
            kv_bytes_per_token=spec.kv_bytes_per_token,
        )

    def _key(self, row: int) -> bytes:
        """What requests that should go to one engine have in common (`gateway.prompt_head`)."""
        trace, routing = self._trace, self._fleet.routing
        if not routing.affinity:
            return hashlib.blake2b(b"%d" % row, digest_size=16).digest()
        digest = hashlib.blake2b(digest_size=16)
        digest.update(trace.tenant_names[trace.tenant[row]].encode())
        size = int(trace.prefix_block_tokens[row])
        if trace.session[row] != NO_SESSION:
            digest.update(b"session %d" % trace.session[row])
        elif size:
            first = int(trace.prefix_offsets[row])
            last = min(first + max(1, routing.prefix_tokens // size), trace.prefix_offsets[row + 1])
            digest.update(trace.prefix_ids[first:last].tobytes())
        else:
            digest.update(b"row %d" % row)
        return digest.digest()

    def _result(self, end_s: float) -> FleetRun:
        for seat in self._seats.values():
            self._stop_paying(seat, end_s)
            if seat.member is not None:
                self._take(seat, seat.member)
        return FleetRun(
            requests=self._requests(),
            engines=tuple(self._seats),
            up_s={name: seat.paid_s for name, seat in self._seats.items()},
            busy_s={name: seat.busy_s for name, seat in self._seats.items()},
            end_s=end_s,
            retried=self._retried,
            loaded_tokens=0 if self._store is None else self._store.loaded_tokens,
        )

    def _take(self, seat: _Seat, member: Member) -> None:
        """Take over what an engine knows of the requests that it has served last."""
        seat.busy_s += member.busy_s
        served = np.flatnonzero(self._served_by == seat.number)
        for name, values in seat.sliced.fold(member.result().requests).items():
            if name not in self._columns:
                unknown = np.nan if values.dtype.kind == "f" else 0
                self._columns[name] = np.full(len(self._trace), unknown, values.dtype)
            self._columns[name][served] = values[served]

    def _requests(self) -> Columns:
        """Each request's figures from the engine that served it last."""
        trace = self._trace
        place = np.array([self._plan.tier_index(name) for name in trace.tier_names], np.int32)
        return {
            **self._columns,
            "tier": place[trace.tier],
            "tenant": trace.tenant.copy(),
            "prompt_tokens": trace.prompt_tokens.copy(),
            "output_tokens": trace.output_tokens.copy(),
            # What a request lived through began when it came to the gateway.
            "arrival_s": self._arrived_s,
            "outcome": self._outcome,
            "engine": self._place,
        }


def _seats(trace: Trace, plan: Plan, specs: Mapping[str, EngineSpec]) -> dict[str, _Seat]:
    """The engines' places; equal engines are sent the same slices."""
    seats: dict[str, _Seat] = {}
    for name, spec in specs.items():
        alike = (seat.sliced for seat in seats.values() if seat.spec == spec)
        seats[name] = _Seat(name, spec, next(alike, None) or in_slices(trace, plan, spec))
    return seats


def _turns(trace: Trace) -> tuple[dict[int, int], npt.NDArray[np.bool_]]:
    """Each turn's successor, and which rows wait for an earlier turn."""
    later = np.zeros(len(trace), np.bool_)
    successor: dict[int, int] = {}
    rows = np.flatnonzero(trace.session != NO_SESSION)
    order = rows[np.lexsort((trace.turn[rows], trace.session[rows]))].tolist()
    for before, after in itertools.pairwise(order):
        if trace.session[before] == trace.session[after]:
            successor[before] = after
            later[after] = True
    return successor, later
