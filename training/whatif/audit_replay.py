"""Replays an audit log: the recorded telemetry and commands through the same guard and policy.

Each decision must come out as it was recorded, bit for bit. Beside it another policy can be asked
what it would have wanted at the same moments: in open loop, so the telemetry stays that of the
allocations which were applied. Which bundle is meant is `audit_policies`' business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from trimtab.agents import audit_entry as entries
from trimtab.agents.audit_entry import NOT_ASKED, AuditError, Decided
from trimtab.agents.audit_read import AuditRun
from trimtab.agents.guard import Guard
from trimtab.agents.knob_entries import named_entries
from trimtab.agents.memory import MemoryFault, recall
from trimtab.agents.policy import Policy
from trimtab.agents.verdict import GuardMode, Verdict
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.errors import TrimtabError
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.training.whatif.open_loop import OpenLoop, OpenLoopResult

_COMMANDS: Final = ("hold", "release", "reload")
_MODE: Final = "mode:"


class PolicyFinder(Protocol):
    """Gives the policies that a log names: `audit_policies.RecordedPolicies`."""

    def find(self, name: str, digest: str | None, *, where: str) -> Policy:
        """A new policy, as it was when it was recorded."""


class RecordedFailureError(TrimtabError):
    """The policy failed when this was recorded."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first thing that was decided otherwise than recorded."""

    number: int
    """The decision's."""
    unix_s: float
    where: str
    """File and line."""
    knob: str
    """Path in the verdict, for instance `apply.weights.T0` or `reasons`."""
    recorded: object
    replayed: object


@dataclass(kw_only=True)
class RunReplay:
    """One run, replayed."""

    engine: str
    run: str
    policy: str
    """The policy's name at the beginning of what is there."""
    from_unix_s: float
    to_unix_s: float
    ticks: int = 0
    """Decision entries, those without a verdict included."""
    replayed: int = 0
    """Verdicts that were decided again."""
    equal: int = 0
    """Those of them that came out bit for bit as recorded."""
    skipped: int = 0
    """Verdicts that could not be decided again: entries before them are lost, or deleted with an
    older file."""
    policy_errors: int = 0
    """Recorded failures of the policy that were raised again."""
    difference: Difference | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """What it was recorded with."""
    torn: Sequence[str] = ()
    """Files that end with half a line."""
    others: Sequence[OpenLoopResult] = ()
    """What the other policies would have asked for."""


class _Recorded(Policy):
    """The policy of the record: fails where it failed then."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.name, self.summary = policy.name, policy.summary
        self.engine_rules = policy.engine_rules
        self.error = ""

    def _reset(self, plan: Plan, seed: int) -> None:
        self.policy.reset(plan, seed)

    def _act(self, telemetry: Telemetry, plan: Plan) -> Allocation:
        if self.error.startswith(NOT_ASKED):
            raise RecordedFailureError(self.error)
        try:
            answer = self.policy.act(telemetry)
        except Exception:
            if not self.error:
                raise
        # A policy that was late has seen the telemetry all the same, and remembers it.
        if self.error:
            raise RecordedFailureError(self.error)
        self.outside_fraction = self.policy.outside_fraction
        return answer


def replay(
    run: AuditRun, policies: PolicyFinder, others: Mapping[str, Policy] | None = None
) -> RunReplay:
    """Decide again what a run decided.

    Args:
        run: What was recorded.
        policies: Finds the recorded policies.
        others: Policies by label that are asked beside them, in open loop.

    Raises:
        AuditError: an entry is damaged, or a recorded policy is not to be had.
    """
    replayer = _Replayer(run, policies, others or {})
    for where, entry in run.entries():
        replayer.take(where, entry)
    return replayer.finish()


class _Replayer:
    """Goes through a run's entries with a guard of its own."""

    def __init__(self, run: AuditRun, policies: PolicyFinder, others: Mapping[str, Policy]) -> None:
        start = run.start
        where = f"{run.parts[0].path} line {run.parts[0].line}"
        self._plan, self._settings, self._mode = entries.decode_start(start, where)
        self._static = Allocation.static(self._plan)
        self._seed = int(start["seed"])
        self._policies = policies
        self._guard: Guard | None = None
        self._policy: _Recorded | None = None
        self._last: int | None = None
        self._others = [
            OpenLoop(label, policy, self._plan, self._settings, self._seed)
            for label, policy in others.items()
        ]
        begin_s = float(start["unix_s"])
        self._result = RunReplay(
            engine=run.engine,
            run=run.run,
            policy=str(start["policy"]),
            from_unix_s=begin_s,
            to_unix_s=begin_s,
            versions=dict(start.get("versions", {})),
            torn=run.torn,
        )

    def take(self, where: str, entry: Mapping[str, Any]) -> None:
        self._result.to_unix_s = max(self._result.to_unix_s, float(entry["unix_s"]))
        match entry["kind"]:
            case entries.START:
                self._start(where, entry)
            case entries.DECISION:
                decided = entries.decode_decision(entry, self._static, where)
                self._decide(where, entry, decided)
            case entries.LOST:
                self._guard = None
            case entries.COMMAND if self._guard is not None:
                _obey(self._guard, str(entry["command"]), where)
            case entries.SWAP if self._guard is not None:
                self._swap(where, entry)
            case entries.INTERRUPTED if self._guard is not None:
                self._guard.interrupted()

    def finish(self) -> RunReplay:
        self._result.others = [other.result() for other in self._others]
        return self._result

    def _start(self, where: str, entry: Mapping[str, Any]) -> None:
        """Begin, or go on from what was remembered when entries before it are missing."""
        after, memory = entry["after"], entry["memory"]
        if self._guard is not None and after == self._last:
            return
        self._guard = None
        if memory is None:
            return
        _, settings, mode = entries.decode_start(entry, where)
        self._policy = self._find(entry, where)
        self._guard = Guard(self._policy, settings, mode=mode)
        self._guard.reset(self._plan, self._seed)
        self._last = after
        if memory:
            try:
                recall(self._guard, memory)
            except MemoryFault as fault:
                raise AuditError(
                    where,
                    key="memory",
                    value=str(fault),
                    bound="that of this version's guard and policy",
                    remedy="replay it with the Trimtab that wrote it",
                ) from None

    def _find(self, entry: Mapping[str, Any], where: str) -> _Recorded:
        return _Recorded(
            self._policies.find(str(entry["policy"]), entry["bundle_digest"], where=where)
        )

    def _swap(self, where: str, entry: Mapping[str, Any]) -> None:
        assert self._guard is not None
        self._policy = self._find(entry, where)
        self._policy.reset(self._plan, self._seed)
        self._guard.policy = self._policy
        self._guard.interrupted()

    def _decide(self, where: str, entry: Mapping[str, Any], decided: Decided) -> None:
        result = self._result
        result.ticks += 1
        if self._last is not None and decided.number not in (self._last, self._last + 1):
            # Lines were taken out.
            self._guard = None
        self._last = decided.number
        telemetry, recorded = decided.telemetry, decided.verdict
        if telemetry is None or recorded is None:
            return
        for other in self._others:
            other.see(telemetry, recorded.apply)
        if self._guard is None or self._policy is None:
            result.skipped += 1
            return
        self._policy.error = decided.policy_error
        result.policy_errors += bool(decided.policy_error)
        verdict = self._guard.decide(telemetry)
        result.replayed += 1
        again = entries.encode_verdict(verdict, self._static)
        # As text: a NaN is itself, and -0 is not 0.
        if entries.text_of(again) == json.dumps(entry["verdict"], separators=(",", ":")):
            result.equal += 1
        elif result.difference is None:
            knob, before, now = _first_difference(recorded, verdict, self._plan)
            result.difference = Difference(
                number=decided.number,
                unix_s=decided.unix_s,
                where=where,
                knob=knob,
                recorded=before,
                replayed=now,
            )


def _obey(guard: Guard, command: str, where: str) -> None:
    """Tell the guard what the operator told it."""
    if command == "hold":
        guard.hold()
    elif command == "release":
        guard.release()
    elif command.startswith(_MODE) and command.removeprefix(_MODE) in list(GuardMode):
        guard.set_mode(GuardMode(command.removeprefix(_MODE)))
    elif command != "reload":
        modes = (f"{_MODE}{mode}" for mode in GuardMode)
        known = ", ".join((*_COMMANDS, *modes))
        raise AuditError(where, key="command", value=command, bound=f"one of {known}")


def _first_difference(
    recorded: Verdict, replayed: Verdict, plan: Plan
) -> tuple[str, object, object]:
    """Path and both values of the first entry that differs."""
    for name in ("mode", "reasons", "exposure", "fell_back"):
        one, other = getattr(recorded, name), getattr(replayed, name)
        if one != other:
            return name, one, other
    for name in ("apply", "proposed"):
        before, now = getattr(recorded, name), getattr(replayed, name)
        if before is None or now is None:
            if before is not now:
                return name, _presence(before), _presence(now)
            continue
        if before.version != now.version:
            return f"{name}.version", before.version, now.version
        entries_before, entries_now = named_entries(before, plan), named_entries(now, plan)
        for path, one in entries_before.items():
            if repr(one) != repr(entries_now[path]):
                return f"{name}.{path}", one, entries_now[path]
    return "form", "a value", "the same value in another form"


def _presence(allocation: Allocation | None) -> str:
    return "none" if allocation is None else "an allocation"
