"""A policy that hangs, raises or ends its thread costs its answer and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from trimtab.agents.audit_entry import NOT_ASKED
from trimtab.agents.guard import Guard
from trimtab.agents.memory import remember
from trimtab.agents.policy import Policy
from trimtab.agents.verdict import GuardReason
from trimtab.controller.daemon.policy_deadline import PolicyLateError, PolicyWithDeadline
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.errors import TrimtabError
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.training.traces.generate import generate

PLAN = load_plan()
STATIC = Allocation.static(PLAN)
LONG_S = 30.0


@pytest.fixture(scope="module")
def telemetry() -> Telemetry:
    spec = get_engine_spec("h100:llama-3.1-8b-tp1")
    return ReplayEngine(generate(hours=0.05, seed=1, spec=spec), PLAN, spec).advance(2.0)


class Told(Policy):
    """Does what it is told; sees how often it was asked."""

    name = "told"
    summary = "does what it is told"

    def __init__(self, answer: Callable[[], Allocation]) -> None:
        self.answer = answer
        self.asked = 0
        self.threads: set[int] = set()

    def _act(self, telemetry: Telemetry, plan: Plan) -> Allocation:
        self.asked += 1
        self.threads.add(threading.get_ident())
        self.outside_fraction = self.asked / 10
        return self.answer()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened in the end, so that no thread is left waiting."""
    gate = threading.Event()
    yield gate
    gate.set()


def waiting_for(gate: threading.Event) -> Told:
    """A policy that answers when the gate is opened."""

    def answer() -> Allocation:
        gate.wait(LONG_S)
        return STATIC

    return Told(answer)


def seated(told: Told, *, deadline_s: float, threaded: bool = True) -> PolicyWithDeadline:
    policy = PolicyWithDeadline(told, deadline_s=deadline_s, threaded=threaded)
    policy.reset(PLAN, 0)
    return policy


@pytest.mark.parametrize("threaded", [True, False])
def test_it_answers_as_the_policy_does(telemetry: Telemetry, threaded: bool) -> None:
    told = Told(lambda: STATIC)
    policy = seated(told, deadline_s=LONG_S, threaded=threaded)
    assert [policy.act(telemetry), policy.act(telemetry)] == [STATIC, STATIC]
    assert policy.outside_fraction == 0.2
    assert policy.error == ""
    assert (threading.get_ident() in told.threads) is not threaded
    assert len(told.threads) == 1
    policy.close()


def test_a_policy_that_hangs_is_late_once_and_then_not_asked_until_it_is_back(
    telemetry: Telemetry, gate: threading.Event
) -> None:
    told = waiting_for(gate)
    policy = seated(told, deadline_s=0.01)
    with pytest.raises(PolicyLateError, match="no answer within"):
        policy.act(telemetry)
    assert not policy.error.startswith(NOT_ASKED)
    for _ in range(3):
        with pytest.raises(PolicyLateError):
            policy.act(telemetry)
        assert policy.error.startswith(NOT_ASKED)
    assert told.asked == 1
    assert remember(Guard(policy)) is None, "it is at work in another thread"
    gate.set()
    policy._deadline_s = LONG_S
    assert policy._late is not None
    assert policy._late.answered.wait(LONG_S)
    assert not policy.busy
    assert policy.act(telemetry) == STATIC
    assert told.asked == 2
    assert policy.error == ""


def test_what_the_policy_raises_is_raised_and_told(telemetry: Telemetry) -> None:
    def fail() -> Allocation:
        raise ZeroDivisionError("on\ntwo lines")

    policy = seated(Told(fail), deadline_s=LONG_S)
    with pytest.raises(ZeroDivisionError):
        policy.act(telemetry)
    assert policy.error == "ZeroDivisionError: on two lines"


def test_a_policy_that_ends_the_process_ends_only_its_answer(telemetry: Telemetry) -> None:
    def leave() -> Allocation:
        raise SystemExit(3)

    told = Told(leave)
    policy = seated(told, deadline_s=LONG_S)
    for _ in range(2):
        with pytest.raises(TrimtabError, match="SystemExit"):
            policy.act(telemetry)
    assert told.asked == 2


def test_behind_the_guard_a_late_policy_is_the_static_plan(
    telemetry: Telemetry, gate: threading.Event
) -> None:
    policy = seated(waiting_for(gate), deadline_s=0.01)
    guard = Guard(policy)
    guard.reset(PLAN, 0)
    verdict = guard.decide(telemetry)
    assert verdict.apply == STATIC
    assert GuardReason.POLICY_FAILED in verdict.reasons
    assert "no answer within 0.01 s" in policy.error


def test_its_thread_ends_with_it(telemetry: Telemetry) -> None:
    policy = seated(Told(lambda: STATIC), deadline_s=LONG_S)
    policy.act(telemetry)
    thread = policy._thread
    assert thread is not None
    assert thread.daemon
    policy.close()
    thread.join(LONG_S)
    assert not thread.is_alive()
