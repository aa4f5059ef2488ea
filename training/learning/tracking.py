"""Tracking as a sink that cannot raise and cannot stall: the run's log here, the copy elsewhere.

Entries go to the log in the run's folder; `uploader`, in a process of its own, copies them to
MLflow. An outage is said once. Registering models is not done here (see `model_registry`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trimtab.training.learning.run_log import RunLog
from trimtab.training.learning.tracking_place import artifact_folder, shown
from trimtab.training.learning.uploader import read_state, renew_state

GRACE_S = 60.0
"""How long the end of a run waits for the copy: making a new database takes some seconds."""
FAULTY_GRACE_S = 5.0
"""How long it waits where the last attempt failed."""
_OUTPUT_NAME = "tracking.log"
_POLL_S = 0.1


class Tracking:
    """One run's record: `log` takes entries, `finish` waits a little for the copy."""

    def __init__(
        self,
        folder: Path,
        *,
        uri: str,
        experiment: str,
        say: Callable[[str], None],
        wall_s: Callable[[], float] = time.time,
        grace_s: float = GRACE_S,
    ) -> None:
        """Open the log and start to copy.

        Args:
            folder: the run's folder.
            uri: where MLflow keeps runs.
            experiment: MLflow's name for the group of runs.
            say: shows one line to the user.
            wall_s: seconds since the epoch, for the log.
            grace_s: longest wait at the end, seconds.
        """
        self.log = RunLog(folder, wall_s=wall_s)
        self._folder = folder
        self._uri = uri
        self._say = say
        self._grace_s = grace_s
        self._said = False
        self._silent = False
        self._process = self._start(experiment)

    def watch(self) -> None:
        """Say an outage, the first time that one is seen."""
        state = read_state(self._folder)
        fault = self.log.fault or (state.fault if state else "")
        if self._silent:
            fault = fault or "it does not answer"
        if self._process is None or self._process.poll() not in (None, 0):
            fault = fault or f"its process ended; see {self._folder / _OUTPUT_NAME}"
        if fault and not self._said:
            self._said = True
            self._say(
                f"tracking at {shown(self._uri)} fails: {shown(fault)}; the run goes on, its log "
                f"is {self._folder / 'run.jsonl'}"
            )

    def finish(self, status: str) -> str | None:
        """Write the end and wait until all is copied, a little; the id of MLflow's run if it was.

        Args:
            status: FINISHED, FAILED or KILLED.
        """
        self.log.end(status)
        start_s = time.monotonic()
        while self._process is not None and self._process.poll() is None:
            state = read_state(self._folder)
            faulty = state is not None and bool(state.fault)
            waited_s = time.monotonic() - start_s
            if waited_s > (min(FAULTY_GRACE_S, self._grace_s) if faulty else self._grace_s):
                self._silent = True
                self._process.kill()
                self._process.wait()
                break
            time.sleep(_POLL_S)
        state = read_state(self._folder)
        if state is not None and state.ended:
            return state.run_id
        self.watch()
        return None

    def _start(self, experiment: str) -> subprocess.Popen[bytes] | None:
        # Where the database is: MLflow puts the folder of its default experiment into the current
        # directory. A session of its own: Ctrl-C is for training.
        beside = artifact_folder(self._uri)
        directory = Path(beside).parent if beside else self._folder
        try:
            renew_state(self._folder)
            with (self._folder / _OUTPUT_NAME).open("ab") as output:
                return subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", "trimtab.training.learning.uploader"),
                        *(str(self._folder.resolve()), self._uri, experiment, str(os.getpid())),
                    ],
                    cwd=directory if directory.is_dir() else self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            self.log.fault = f"cannot start its process: {error.strerror}"
            return None
