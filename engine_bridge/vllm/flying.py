"""Steps that are scheduled and whose output is not back: what they carry, and how they are booked.

A step is booked when its output is back, for the time that it took. Where the next one is planned
before that (asynchronous scheduling), it is booked as believed and the belief corrected later.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from trimtab.engine_bridge.vllm.clock import Clock
from trimtab.engine_bridge.vllm.ledger import Ledger
from trimtab.engine_bridge.vllm.step_log import NOTHING_ENCODED

_SLOWEST, _FASTEST = 5.0, 0.2
"""A step's time over what is believed, beyond which it is taken for an accident and cut."""
_NO_TIME: Final = 1e-3
"""Least time of a step over the model's: an emulated engine's may take none."""
_MOST_ENCODING: Final = 0.5
"""Part of a step's time beyond which it says more of the encoders than of the language model."""


class FlyingStep(NamedTuple):
    """A step that was scheduled and whose output is not back."""

    model_ms: float
    start_s: float
    facts: list[float]
    """As `Ledger.step_facts` tells them."""
    draft_ms: float
    """What draft tokens add to the model's time."""
    encoded: tuple[int, ...] = NOTHING_ENCODED
    """Media that it encodes, as `step_log.ENCODED` names them."""
    booked: bool = False

    @property
    def tells_drift(self) -> bool:
        """Whether its time says how far the engine has drifted from the step-time model."""
        if not any(self.encoded):
            return True
        return 0.0 < self.facts[-1] <= _MOST_ENCODING * self.model_ms


class FlyingSteps:
    """The steps of one engine that are under way, in their order."""

    def __init__(self, ledger: Ledger) -> None:
        """None yet."""
        self._ledger = ledger
        self._steps: deque[FlyingStep] = deque()
        self._last_output_s = float("-inf")

    def add(self, step: FlyingStep) -> None:
        """A step has been scheduled."""
        self._steps.append(step)

    def book_unbooked(self) -> None:
        """A step whose output is not back yet (asynchronous) is booked as believed."""
        if self._steps and not self._steps[-1].booked:
            step = self._steps.pop()
            if step.model_ms:
                self._ledger.book(self._ledger.scale, step.draft_ms)
            self._steps.append(step._replace(booked=True))

    def land(self, clock: Clock, now_s: float) -> tuple[FlyingStep, float]:
        """The oldest step's output is back: book its time, or correct the belief.

        Returns:
            The step, and when the device began it, seconds.
        """
        step = self._steps.popleft()
        start_s = max(step.start_s, self._last_output_s)
        self._last_output_s = now_s
        ledger = self._ledger
        if step.model_ms:
            speed = clock.speed(step.model_ms + step.draft_ms, start_s, now_s)
            speed = min(max(speed, _FASTEST * ledger.scale, _NO_TIME), _SLOWEST * ledger.scale)
            if not step.booked:
                ledger.book(speed, step.draft_ms, learns=step.tells_drift)
            elif step.tells_drift:
                ledger.believe(speed)
        if not step.booked:
            ledger.set_now(now_s)
        return step, start_s
