"""Waiting for other processes: until something is so, and at which free port."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def poll(
    found: Callable[[], bool], *, what: str, deadline_s: float = 60.0, every_s: float = 0.05
) -> float:
    """Wait until something is so, and say how long it took, seconds; without it, fail."""
    start_s = time.monotonic()
    while not found():
        assert time.monotonic() < start_s + deadline_s, f"{what}: not within {deadline_s:g} s"
        time.sleep(every_s)
    return time.monotonic() - start_s


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
