"""Spreads independent jobs over processes; results come in the order of the jobs.

It knows nothing of replays. What all jobs share is handed to each process once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar, cast

from trimtab.engine_bridge.errors import TrimtabError

Shared = TypeVar("Shared")
Job = TypeVar("Job")
Result = TypeVar("Result")

_share: object = None


class Pool(Generic[Shared]):
    """Processes that all hold one value; use it as a context.

    On Linux they are forked, so that code compiled before is compiled no more.
    """

    def __init__(self, shared: Shared, *, processes: int | None = None) -> None:
        """Make the pool; it starts its processes with the first jobs.

        Args:
            shared: what every job needs, handed to each process once.
            processes: at most so many at once; 1 runs the jobs here, None is one a CPU.
        """
        self._shared = shared
        self._processes = processes or os.cpu_count() or 1
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Pool[Shared]:
        """Start nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes; jobs that have not begun are dropped."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def map(
        self, function: Callable[[Shared, Job], Result], jobs: Sequence[Job]
    ) -> Iterator[Result]:
        """The results of `function(shared, job)`, in the order of the jobs.

        Args:
            function: a function of a module, so that a process can find it.
            jobs: what differs from one call to the other.

        Raises:
            TrimtabError: a process died.
        """
        if self._processes == 1:
            yield from (function(self._shared, job) for job in jobs)
            return
        if self._executor is None:
            self._executor = ProcessPoolExecutor(
                max_workers=self._processes,
                mp_context=multiprocessing.get_context(
                    "fork" if sys.platform == "linux" else "spawn"
                ),
                initializer=_adopt,
                initargs=(self._shared,),
            )
        try:
            results = self._executor.map(_call, [function] * len(jobs), jobs)
            yield from cast(Iterator[Result], results)
        except BrokenProcessPool as fault:
            raise TrimtabError("a worker process died, perhaps for want of memory") from fault


def _adopt(shared: object) -> None:
    global _share
    _share = shared
    # Ctrl-C reaches the whole group of processes; what is to be done then is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _call(function: Callable[[Any, Any], object], job: object) -> object:
    return function(_share, job)
