"""How full this server's engine is, asked of its control socket in the background.

The API server's process has no other way to the scheduler's queue. It only asks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from trimtab.engine_bridge.admission.core import EngineLoad
from trimtab.engine_bridge.vllm.control_client import ControlClient
from trimtab.engine_bridge.vllm.control_errors import ControlRefusedError, ControlUnavailableError

EVERY_S: Final = 0.25
"""Time between two questions."""


class LoadReading:
    """The newest answers, and since when they are true."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        """Start without any."""
        self._monotonic_s = monotonic_s
        self._latest: tuple[int, float] | None = None
        self._steps = -1
        self._true_s = 0.0

    def take(self, health: dict[str, Any]) -> None:
        """An answer of the engine's `health`.

        An engine that has requests but makes no steps says nothing new, however often it is asked.
        """
        try:
            steps, running = int(health["steps"]), int(health["running"])
            waiting, blocks = int(health["waiting"]), int(health["blocks"])
            free = int(health["free_blocks"])
        except (KeyError, TypeError, ValueError):
            return
        if steps != self._steps or not running + waiting:
            self._true_s = self._monotonic_s()
        self._steps = steps
        self._latest = (waiting, 1.0 - free / blocks if blocks > 0 else 0.0)

    def load(self) -> EngineLoad | None:
        """The load as it was last told; None before the first answer."""
        if self._latest is None:
            return None
        waiting, kv_use = self._latest
        age_s = max(0.0, self._monotonic_s() - self._true_s)
        return EngineLoad(queue_length=waiting, kv_use_fraction=kv_use, age_s=age_s)


class LoadWatch:
    """Asks in a thread of its own, from the first question on."""

    def __init__(self, address: str, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Say where the control socket is."""
        self._address = address
        self._reading = LoadReading(monotonic_s)
        self._thread: threading.Thread | None = None

    def __call__(self, model: str) -> EngineLoad | None:
        """The engine's load; the server has one engine, whatever its models are called."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trimtab-load", daemon=True)
            self._thread.start()
        return self._reading.load()

    def _run(self) -> None:
        client = ControlClient(self._address)
        while True:
            # Without an answer the reading grows old, and that is what it says.
            with suppress(ControlUnavailableError, ControlRefusedError, KeyError):
                self._reading.take(client.health()["engine"])
            time.sleep(EVERY_S)
