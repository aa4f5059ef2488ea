"""What the web part needs of the daemon, and nothing more; the daemon itself meets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from trimtab.controller.daemon.command import Command
from trimtab.controller.daemon.state import LoopState


class DaemonView(Protocol):
    """The daemon, as the web server's thread sees it: every call is short and thread-safe."""

    def states(self) -> Mapping[str, LoopState]:
        """The newest state of every loop by its engine's name, in the order of the settings."""

    def command(self, engine: str | None, command: Command) -> None:
        """Give an order to one loop, or to all for None; they apply it at their next tick.

        The name is one of `states`: whoever calls has looked.
        """

    def now_unix_s(self) -> float:
        """Seconds since 1970."""


def since_tick_s(state: LoopState, now_unix_s: float) -> float:
    """Time since the loop's last tick, seconds; infinite before the first, 0 if clocks disagree."""
    if not state.history:
        return float("inf")
    return max(0.0, now_unix_s - state.history[-1].unix_s)


def age_now_s(state: LoopState, now_unix_s: float) -> float:
    """Age of the telemetry now, seconds: it grows when the loop hangs, too; infinite without."""
    return state.age_s + since_tick_s(state, now_unix_s) if state.telemetry else float("inf")
