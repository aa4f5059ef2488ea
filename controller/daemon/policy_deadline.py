"""A policy that is waited for only so long: what hangs costs its answer, never the loop.

The policy runs in a thread of its own. What is done about a missing answer is the guard's business.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

from trimtab.agents.audit_entry import NOT_ASKED
from trimtab.agents.policy import Policy
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.errors import TrimtabError
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry


class PolicyLateError(TrimtabError):
    """The policy gave no answer in time."""


@dataclass
class _Question:
    telemetry: Telemetry
    answered: threading.Event = field(default_factory=threading.Event)
    allocation: Allocation | None = None
    error: Exception | None = None


class PolicyWithDeadline(Policy):
    """Another policy, with a deadline for each answer.

    While a late policy is away every question fails at once, so that one that hangs for good costs
    nothing more. Its thread cannot be ended; it is a daemon thread and ends with the process.
    """

    def __init__(self, policy: Policy, *, deadline_s: float, threaded: bool = True) -> None:
        """Wrap a policy.

        Args:
            policy: Whom to ask; it is never asked two things at once.
            deadline_s: Longest wait for an answer, seconds.
            threaded: False asks in the caller's thread, without a deadline, for virtual time.
        """
        self.policy = policy
        self.name = policy.name
        self.summary = policy.summary
        self.engine_rules = policy.engine_rules
        self.error = ""
        """Why it gave nothing when it was asked last; empty if it answered. Begins with `NOT_ASKED`
        where the question did not reach it."""
        self._deadline_s = deadline_s
        self._threaded = threaded
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._late: _Question | None = None

    @property
    def busy(self) -> bool:
        """Whether the policy is late and still at work: nobody knows what it remembers."""
        return self._late is not None and not self._late.answered.is_set()

    def _reset(self, plan: Plan, seed: int) -> None:
        self.policy.reset(plan, seed)

    def _act(self, telemetry: Telemetry, plan: Plan) -> Allocation:
        self.error = ""
        try:
            answer = self._in_time(telemetry) if self._threaded else self.policy.act(telemetry)
        except Exception as error:
            self.error = str(error) if isinstance(error, TrimtabError) else _words(error)
            raise
        self.outside_fraction = self.policy.outside_fraction
        return answer

    def _in_time(self, telemetry: Telemetry) -> Allocation:
        if self.busy:
            raise PolicyLateError(f"{NOT_ASKED}policy {self.name} is busy with an earlier interval")
        self._late = None
        question = _Question(telemetry)
        self._ask(question)
        if not question.answered.wait(self._deadline_s):
            self._late = question
            raise PolicyLateError(f"policy {self.name}: no answer within {self._deadline_s:g} s")
        if question.error is not None:
            raise question.error
        assert question.allocation is not None
        return question.allocation

    def _ask(self, question: _Question) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._answer, name=f"trimtab-policy-{self.name}", daemon=True
            )
            self._thread.start()
        self._questions.put(question)

    def _answer(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                question.allocation = self.policy.act(question.telemetry)
            except Exception as error:
                question.error = error
            except BaseException as error:
                # A policy that wants to end the process ends nothing but its own answer.
                question.error = TrimtabError(_words(error))
            question.answered.set()

    def close(self) -> None:
        """Let the thread end after what it is busy with."""
        self._questions.put(None)


def _words(error: BaseException) -> str:
    """A fault of the policy on one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
