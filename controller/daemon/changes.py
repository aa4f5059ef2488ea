"""Log lines about what has changed, not about what is still so.

A loop ticks every two seconds: a fault that lasts an hour is worth two lines, not 1,800.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Final

REPEAT_S: Final = 60.0
"""A subject that changes back and forth says the same again only after so long, seconds."""
_MOST_REMEMBERED: Final = 256


class ChangeLog:
    """What was said last about each subject of one engine."""

    def __init__(
        self, log: logging.Logger, engine: str, *, monotonic_s: Callable[[], float]
    ) -> None:
        """Begin with nothing said.

        Args:
            log: Where lines go.
            engine: The engine's name, before each line.
            monotonic_s: Seconds that never go back.
        """
        self._log, self._engine, self._monotonic_s = log, engine, monotonic_s
        self._said: dict[tuple[str, Hashable], float] = {}
        self._now: dict[str, Hashable] = {}
        self._unsaid = 0

    def note(self, subject: str, value: Hashable, line: str, *, level: int = logging.INFO) -> None:
        """Say a line if the subject has another value than at the last note.

        Args:
            subject: What it is about.
            value: What is so now; empty is how a subject begins.
            line: What to say.
            level: Of `logging`.
        """
        before = self._now.get(subject, "")
        self._now[subject] = value
        if value == before:
            return
        now_s = self._monotonic_s()
        said_s = self._said.get((subject, value))
        if said_s is not None and now_s - said_s < REPEAT_S:
            self._unsaid += 1
            return
        if len(self._said) >= _MOST_REMEMBERED:
            self._said.clear()
        self._said[subject, value] = now_s
        more = f" ({self._unsaid} more changes unsaid)" if self._unsaid else ""
        self._unsaid = 0
        self._log.log(level, "%s: %s%s", self._engine, line, more)
