"""One engine's control loop: look, decide, ask, record, show.

A tick is bounded and never raises: whatever a policy, a source, the engine, the disk or a clock
does ends as a state, a log line and at worst the static plan. When it ticks is `daemon`'s business.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final, Protocol

from trimtab.agents.audit_entry import (
    command_entry,
    decision_entry,
    interrupted_entry,
    lost_entry,
    start_entry,
    swap_entry,
)
from trimtab.agents.guard import Guard
from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.memory import remember
from trimtab.agents.verdict import GuardMode
from trimtab.controller.daemon.audit_log import Audit
from trimtab.controller.daemon.bundle_watch import Offer, PolicySource
from trimtab.controller.daemon.changes import ChangeLog
from trimtab.controller.daemon.command import Command, CommandKind
from trimtab.controller.daemon.state import MOST_HISTORY, Contact, Decision, LoopState
from trimtab.controller.daemon.tick import Tick, decision_of, detail_of, log_changes
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.live.live_engine import LiveEngine, Reading
from trimtab.engine_bridge.live.snapshot import Unavailable
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.vllm.control_errors import ControlRefusedError, ControlUnavailableError

_LOG: Final = logging.getLogger("trimtab.daemon")
_HELD: Final = "held"
_MOST_WORDS: Final = 300


class Profiler(Protocol):
    """What looks for a reason to profile the engine's traffic, once a tick."""

    @property
    def profile(self) -> str:
        """Path of the last profile; empty without one."""

    @property
    def detail(self) -> str:
        """Why the last one failed; empty if it did not."""

    def see(self, telemetry: Telemetry | None, unix_s: float) -> None:
        """Take a tick's telemetry in."""

    def close(self) -> None:
        """End what is under way."""


class EngineLoop:
    """The loop of one engine. `tick` belongs to one thread; `command` and `state` to all."""

    def __init__(
        self,
        name: str,
        engine: LiveEngine,
        source: PolicySource,
        audit: Audit,
        *,
        holder: str,
        settings: GuardSettings,
        mode: GuardMode,
        seed: int = 0,
        profiler: Profiler | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        unix_s: Callable[[], float] = time.time,
        faults: int = 0,
    ) -> None:
        """Begin; the engine is not asked anything yet.

        Args:
            name: The engine's name in the settings.
            engine: The engine, and the plan.
            source: Gives the policy, and newer ones.
            audit: Takes an entry for each decision.
            holder: The name that `engine` takes leases under.
            settings: The guard's.
            mode: The mode to begin in.
            seed: For the policy's `reset`.
            profiler: Looks for a reason to profile traffic; None: nobody does.
            monotonic_s: Seconds that never go back.
            unix_s: Seconds since 1970, for people.
            faults: Of the loops before this one.
        """
        self.name, self.engine = name, engine
        self._source, self._audit, self._holder, self._seed = source, audit, holder, seed
        self._profiler = profiler
        self._monotonic_s, self._unix_s = monotonic_s, unix_s
        self._plan = engine.plan
        self._static = Allocation.static(self._plan)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._changes = ChangeLog(_LOG, name, monotonic_s=monotonic_s)
        self._history: deque[Decision] = deque(maxlen=MOST_HISTORY)
        self._offer: Offer = source.first()
        self._guard = Guard(self._offer.policy, settings, mode=mode)
        self._guard.reset(self._plan, seed)
        self._first_mode = mode
        self._ours = self._blind = False
        self._late_ticks = 0
        self._faults = faults
        self._number = 0
        self.faults_in_a_row = 0
        """Ticks since the last good one that failed by a fault of our own."""
        self._state = self._first_state()
        audit.begin(self._start_entry)

    @property
    def state(self) -> LoopState:
        """The state after the last tick; never changed, only replaced."""
        return self._state

    def command(self, command: Command) -> None:
        """Give an order, which the next tick carries out; from any thread."""
        self._commands.put(command)

    def untold(self) -> Iterator[Command]:
        """Take the orders back that no tick has carried out; for who puts another loop here."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._commands.get_nowait()

    def tick(self, *, late_ticks: int = 0) -> LoopState:
        """Look, decide and ask once.

        Args:
            late_ticks: Ticks so far that came late or were left out.
        """
        began_s = self._monotonic_s()
        self._late_ticks = late_ticks
        try:
            self._carry_out_commands()
            self._take_newer_policy()
            self._state = self._shown(self._run(), began_s)
            self.faults_in_a_row = 0
        except Exception as fault:
            # Only the lease is let go by this: the engine returns to static by itself.
            self._faults += 1
            self.faults_in_a_row += 1
            if self.faults_in_a_row == 1:
                _LOG.exception("%s: a tick failed by a fault of Trimtab", self.name)
            words = f"a fault of Trimtab: {type(fault).__name__}: {fault}"[:_MOST_WORDS]
            # The guard may have been called without an entry: a replay must not go on from there.
            self._audit.append(lost_entry(unix_s=self._unix_s(), entries=1, reason=words))
            self._state = replace(
                self._state,
                detail=words,
                # What was ordered in this tick holds all the same.
                mode=self._guard.mode,
                latched=self._guard.latched,
                faults=self._faults,
                late_ticks=late_ticks,
                lease_left_s=self.engine.lease_left_s,
            )
        return self._state

    def close(self) -> None:
        """Give the lease back, if it is ours, and end what belongs to the loop."""
        if self._ours or self.engine.lease_left_s > 0:
            try:
                self.engine.release()
                _LOG.info("%s: lease given back", self.name)
            except Exception as error:
                # Whatever is wrong, the lease runs out by itself.
                _LOG.warning("%s: lease not given back, it will run out: %s", self.name, error)
        if self._profiler is not None:
            self._profiler.close()
        self._offer.policy.close()
        self.engine.close()

    def _run(self) -> Tick:
        lease_left_s = self.engine.lease_left_s
        reading = self.engine.poll()
        left_s = self.engine.lease_left_s
        tick = Tick(
            number=self._number + 1,
            reading=reading,
            contact=self._stand(reading),
            asked=self._static,
            ours_until_s=self._monotonic_s() + left_s if left_s > 0 else math.inf,
        )
        if tick.contact in (Contact.CONTROLLING, Contact.NO_TELEMETRY):
            self._notice_interruption(reading, lease_left_s)
            if reading.telemetry is not None:
                self._decide(reading.telemetry, tick)
            self._ask(tick)
        elif reading.control is not None:
            self._ours = False
        self._record(tick)
        if self._profiler is not None:
            self._profiler.see(reading.telemetry, self._unix_s())
        return tick

    def _stand(self, reading: Reading) -> Contact:
        """How we stand with the engine before it is asked for anything."""
        control = reading.control
        if control is None:
            unknown = self._state.contact is Contact.STARTING
            return Contact.STARTING if unknown else Contact.NO_CONTROL
        if control.plan_digest != self._plan.digest:
            return Contact.WRONG_PLAN
        failure = reading.failure
        if failure is not None and failure.reason is Unavailable.OTHER_ENGINE:
            return Contact.WRONG_ENGINE
        if control.holder not in (None, self._holder):
            return Contact.STANDBY
        usable = self._younger(reading.telemetry, self._guard.settings.hold_after_intervals)
        return Contact.CONTROLLING if usable else Contact.NO_TELEMETRY

    def _younger(self, telemetry: Telemetry | None, intervals: float) -> bool:
        most_s = intervals * self._plan.controller.interval_s
        return telemetry is not None and telemetry.age_s <= most_s

    def _notice_interruption(self, reading: Reading, lease_left_s: float) -> None:
        """Tell the guard if the engine was not ours, or not seen, since the last tick.

        The guard knows the time by the figures: where they are old it is told again once new ones
        come, as the time in between was no probation.
        """
        held = reading.control is not None and reading.control.holder == self._holder
        whole = held and lease_left_s > 0
        if self._ours:
            words = "the lease holds" if whole else "the lease had run out: static, and a probation"
            self._changes.note("lease", not whole or "", words, level=logging.WARNING)
        young = self._younger(reading.telemetry, self._guard.settings.static_after_intervals)
        reason = ""
        if not self._ours:
            reason = "the lease is new"
        elif not whole:
            reason = "the lease had run out"
        elif self._blind and reading.fresh:
            reason = "the figures had been missing"
        self._blind = not young or (not reading.fresh and (self._blind or bool(reason)))
        self._ours = self._ours and whole
        if not reason:
            return
        self._guard.interrupted()
        self._audit.append(interrupted_entry(unix_s=self._unix_s(), reason=reason))

    def _decide(self, telemetry: Telemetry, tick: Tick) -> None:
        # Whether it fails now: the guard does not always ask it, nor always say that it failed.
        self._offer.policy.error = ""
        tick.verdict = self._guard.decide(telemetry)
        tick.policy_error = self._offer.policy.error
        tick.asked = tick.verdict.apply

    def _ask(self, tick: Tick) -> None:
        """Ask the engine for what was decided; this renews the lease, too.

        A process that is stopped in the middle of a tick may ask long after it looked: what was
        decided for an engine that was ours is not asked of one that has gone back to static.
        """
        if self._monotonic_s() >= tick.ours_until_s:
            tick.asked = self._static
        try:
            tick.applied = self.engine.apply(tick.asked)
            # If it ran out meanwhile, the next tick takes the lease for a new one.
            self._ours = self._monotonic_s() < tick.ours_until_s
        except ControlRefusedError as error:
            tick.refusal = str(error)
            self._ours = False
            tick.contact = Contact.STANDBY if error.code == _HELD else Contact.NO_CONTROL
        except ControlUnavailableError as error:
            tick.refusal = str(error)
            tick.contact = Contact.NO_CONTROL

    def _carry_out_commands(self) -> None:
        for command in self.untold():
            text = str(command.kind) if command.mode is None else f"{command.kind}:{command.mode}"
            match command.kind:
                case CommandKind.HOLD:
                    self._guard.hold()
                case CommandKind.RELEASE:
                    self._guard.release()
                case CommandKind.MODE if command.mode is not None:
                    self._guard.set_mode(command.mode)
                case _:
                    self._source.reload()
            self._audit.append(command_entry(unix_s=self._unix_s(), command=text, by=command.by))
            _LOG.info("%s: %s by %s", self.name, text, command.by or "nobody named")

    def _take_newer_policy(self) -> None:
        """Go over to a newer policy that is ready; it begins with a probation.

        Not while the operator holds: what he holds is the allocation of the one before.
        """
        if self._guard.mode is GuardMode.HOLD:
            return
        offer = self._source.newer()
        if offer is None:
            return
        self._offer.policy.close()
        self._offer = offer
        self._guard.policy = offer.policy
        self._guard.interrupted()
        self._audit.append(
            swap_entry(
                unix_s=self._unix_s(),
                policy=self._source.name,
                bundle_digest=offer.bundle_digest,
            )
        )
        _LOG.info("%s: policy is now %s %s", self.name, self._source.name, _short(offer))

    def _record(self, tick: Tick) -> None:
        reading = tick.reading
        self._number = tick.number
        self._audit.append(
            decision_entry(
                number=tick.number,
                unix_s=self._unix_s(),
                static=self._static,
                telemetry=reading.telemetry,
                fresh=reading.fresh,
                verdict=tick.verdict,
                applied=tick.applied,
                contact=tick.contact,
                policy_error=tick.policy_error,
            )
        )
        log_changes(self._changes, tick, audit=self._audit.failure, latched=self._guard.latched)

    def _shown(self, tick: Tick, began_s: float) -> LoopState:
        mode, profiler = self._guard.mode, self._profiler
        tick_ms = (self._monotonic_s() - began_s) * 1e3
        self._history.append(decision_of(tick, unix_s=self._unix_s(), mode=mode, tick_ms=tick_ms))
        control = tick.reading.control
        holder = self._state.holder if control is None else control.holder
        return replace(
            self._state,
            bundle_digest=self._offer.bundle_digest,
            bundle_error=self._source.error,
            contact=tick.contact,
            detail=detail_of(
                tick,
                self._plan,
                audit=self._audit.failure,
                profile="" if profiler is None else profiler.detail,
            ),
            holder=self._holder if tick.applied is not None else holder,
            lease_left_s=self.engine.lease_left_s,
            mode=mode,
            latched=self._guard.latched,
            tally=self._guard.tally,
            telemetry=tick.reading.telemetry,
            age_s=tick.age_s,
            history=tuple(self._history),
            ticks=tick.number,
            late_ticks=self._late_ticks,
            faults=self._faults,
            audit_lost=self._audit.lost,
            profile="" if profiler is None else profiler.profile,
        )

    def _first_state(self) -> LoopState:
        return LoopState(
            engine=self.name,
            plan=self._plan,
            policy=self._source.name,
            bundle_digest=self._offer.bundle_digest,
            bundle_error=self._source.error,
            contact=Contact.STARTING,
            detail="",
            holder=None,
            lease_left_s=0.0,
            mode=self._guard.mode,
            latched=False,
            tally=self._guard.tally,
            telemetry=None,
            age_s=math.inf,
            history=(),
            ticks=0,
            late_ticks=0,
            audit_lost=self._audit.lost,
            profile="",
            faults=self._faults,
        )

    def _start_entry(self) -> Mapping[str, object]:
        after = self._number
        return start_entry(
            unix_s=self._unix_s(),
            engine=self.name,
            plan=self._plan,
            policy=self._source.name,
            bundle_digest=self._offer.bundle_digest,
            settings=self._guard.settings,
            mode=self._first_mode,
            seed=self._seed,
            memory=remember(self._guard) if after else {},
            after=after,
        )


def _short(offer: Offer) -> str:
    return "" if offer.bundle_digest is None else offer.bundle_digest[:12]
