"""The progress bar of a training run, on standard error if that is a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_REFRESH_S = 0.25


class ProgressBar:
    """Steps, speed and the last validation. Without a terminal it shows nothing."""

    def __init__(
        self, total: int, *, console: Console, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare a bar of `total` steps."""
        self._clock_s = clock_s
        self._shown_s = -_REFRESH_S
        # No refresh thread: validation forks, and a fork copies only the thread that calls it.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TextColumn("{task.fields[last]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=total, last="")

    def __enter__(self) -> Self:
        """Show the bar."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take it away."""
        self._progress.stop()

    def show(self, step: int) -> None:
        """Move to a step, at most a few times a second."""
        now_s = self._clock_s()
        if now_s - self._shown_s >= _REFRESH_S:
            self._shown_s = now_s
            self._progress.update(self._task, completed=step)
            self._progress.refresh()

    def note(self, text: str) -> None:
        """Show the last news beside the bar."""
        self._progress.update(self._task, last=text)
        self._progress.refresh()
