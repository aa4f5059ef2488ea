"""The run's own record: one JSON line an entry in `run.jsonl`, the truth that tracking copies.

Writing never raises: a full disk must not end training. It knows no tracking server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

LOG_NAME = "run.jsonl"


class RunLog:
    """Appends entries; every one is on disk when its call returns."""

    def __init__(self, folder: Path, *, wall_s: Callable[[], float]) -> None:
        """Open the log of a run.

        Args:
            folder: where the run keeps its files.
            wall_s: seconds since the epoch, for the time of each entry.
        """
        self._path = folder / LOG_NAME
        self._wall_s = wall_s
        self.fault: str | None = None
        """Why entries are missing, if any is."""

    def params(self, values: Mapping[str, object]) -> None:
        """Settings of the run, each by its name."""
        self._write("params", values={name: str(value) for name, value in values.items()})

    def tags(self, values: Mapping[str, str]) -> None:
        """Facts about the run that are no settings."""
        self._write("tags", values=dict(values))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Figures at a training step; those that are not finite are left out."""
        finite = {name: float(v) for name, v in values.items() if math.isfinite(v)}
        self._write("metrics", step=step, values=finite)

    def dataset(self, *, name: str, digest: str, source: str, context: str, rows: int) -> None:
        """A trace that the run used; `context` says what for."""
        self._write("dataset", name=name, digest=digest, source=source, context=context, rows=rows)

    def artifact(self, path: str, *, under: str = "") -> None:
        """A file or folder of the run's folder, to be kept with the run."""
        self._write("artifact", path=path, under=under)

    def end(self, status: str) -> None:
        """The last entry: FINISHED, FAILED or KILLED."""
        self._write("end", status=status)

    def _write(self, kind: str, **content: object) -> None:
        entry = {"kind": kind, "time_ms": round(self._wall_s() * 1e3), **content}
        try:
            # One write of a whole line: a kill in between leaves no half entry but the last.
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, allow_nan=False) + "\n")
        except OSError as error:
            self.fault = f"{self._path}: {error.strerror}"
