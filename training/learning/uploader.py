"""Copies a run's log into MLflow, in a process of its own beside training.

A server that hangs, a locked database and MLflow's own seconds of start-up stall this process and
never the one that trains. What could not be copied stays in the log: started again, it goes on
where it stopped. It decides nothing and reads no trace.

    python -m trimtab.training.learning.uploader FOLDER URI EXPERIMENT PARENT
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.engine_bridge.atomic import write_text
from trimtab.training.learning.run_log import LOG_NAME
from trimtab.training.learning.tracking_place import artifact_folder, connect

if TYPE_CHECKING:
    from mlflow import MlflowClient

STATE_NAME = "mlflow.json"
_LOCK_NAME = ".uploader.lock"
ATTEMPTS_AT_END = 3
_POLL_S = 0.5
_LONGEST_PAUSE_S = 30.0
_MOST_METRICS, _MOST_PARAMS, _MOST_TAGS = 1000, 100, 100
_LONGEST_PARAM, _LONGEST_TAG, _LONGEST_DIGEST = 6000, 5000, 36
_BAD_IN_NAMES = re.compile(r"[^\w\-. :/]")
_BAD_IN_FOLDERS = re.compile(r"[^\w\-.]")


@dataclass(kw_only=True)
class UploadState:
    """How far the log was copied, and where to."""

    uri: str
    experiment: str
    run_id: str = ""
    offset: int = 0
    """Bytes of the log that are in MLflow."""
    ended: bool = False
    """Whether the run's end is there, too."""
    fault: str = ""
    """Why the last attempt failed; empty after one that did not."""


def read_state(folder: Path) -> UploadState | None:
    """How far a folder's run was copied; None where nothing was tried yet."""
    try:
        return UploadState(**json.loads((folder / STATE_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def renew_state(folder: Path) -> None:
    """Forget what an earlier process said of its success, not where it stopped."""
    state = read_state(folder)
    if state is not None:
        _write(folder, replace(state, ended=False, fault=""))


class Uploader:
    """Copies what is new in the log, each time it is asked."""

    def __init__(self, folder: Path, state: UploadState) -> None:
        """Go on from `state`, of the run in `folder`."""
        self._folder = folder
        self._log = folder / LOG_NAME
        self.state = state
        self._client: MlflowClient | None = None

    def copy(self) -> bool:
        """Copy all whole entries that are new; whether any was.

        Raises:
            Exception: whatever MLflow raises; the entries are tried again the next time.
        """
        with self._log.open("rb") as file:
            file.seek(self.state.offset)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        if not text:
            return False
        entries = [json.loads(line) for line in text.splitlines()]
        client = self._connected(entries[0])
        self._send(client, entries)
        self.state.offset += len(text)
        self.state.fault = ""
        self.save()
        return True

    def save(self) -> None:
        """Remember the state for whoever asks, and for a later start."""
        _write(self._folder, self.state)

    def end(self, status: str) -> None:
        """Mark a run as ended whose log has no end."""
        if self._client is not None and self.state.run_id and not self.state.ended:
            self._client.set_terminated(self.state.run_id, status)

    def _connected(self, first: Mapping[str, Any]) -> MlflowClient:
        fresh = self._client is None
        if self._client is None:
            self._client = connect(self.state.uri)
        if not self.state.run_id:
            experiment = _experiment(self._client, self.state.uri, self.state.experiment)
            run = self._client.create_run(
                experiment, start_time=first["time_ms"], run_name=self._folder.name
            )
            self.state.run_id = run.info.run_id
            self.save()
        elif fresh:
            self._client.update_run(self.state.run_id, status="RUNNING")
        return self._client

    def _send(self, client: MlflowClient, entries: list[dict[str, Any]]) -> None:
        from mlflow.entities import Metric, Param, RunTag

        run_id = self.state.run_id
        metrics = [
            Metric(_name(key), value, entry["time_ms"], entry["step"])
            for entry in entries
            if entry["kind"] == "metrics"
            for key, value in entry["values"].items()
        ]
        params = [Param(k, v[:_LONGEST_PARAM]) for k, v in _merged(entries, "params").items()]
        tags = [RunTag(k, v[:_LONGEST_TAG]) for k, v in _merged(entries, "tags").items()]
        for part in _parts(metrics, _MOST_METRICS):
            client.log_batch(run_id, metrics=part)
        for part in _parts(params, _MOST_PARAMS):
            client.log_batch(run_id, params=part)
        for part in _parts(tags, _MOST_TAGS):
            client.log_batch(run_id, tags=part)
        _send_datasets(client, run_id, [e for e in entries if e["kind"] == "dataset"])
        for entry in entries:
            self._send_file_or_end(client, entry)

    def _send_file_or_end(self, client: MlflowClient, entry: Mapping[str, Any]) -> None:
        if entry["kind"] == "artifact":
            path = self._folder / entry["path"]
            under = entry["under"] or None
            if path.is_dir():
                client.log_artifacts(self.state.run_id, str(path), artifact_path=under)
            elif path.is_file():
                client.log_artifact(self.state.run_id, str(path), artifact_path=under)
        elif entry["kind"] == "end":
            client.log_artifact(self.state.run_id, str(self._log))
            client.set_terminated(self.state.run_id, entry["status"], entry["time_ms"])
            self.state.ended = True


def _write(folder: Path, state: UploadState) -> None:
    write_text(folder / STATE_NAME, json.dumps(asdict(state), indent=2) + "\n")


def _send_datasets(client: MlflowClient, run_id: str, entries: list[dict[str, Any]]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    if not entries:
        return
    client.log_inputs(
        run_id,
        [
            DatasetInput(
                Dataset(
                    name=entry["name"],
                    # The column holds 36 characters; the whole digest is in the source.
                    digest=entry["digest"][:_LONGEST_DIGEST],
                    source_type="local",
                    source=json.dumps({"uri": entry["source"], "sha256": entry["digest"]}),
                    profile=json.dumps({"num_rows": entry["rows"]}),
                ),
                [InputTag("mlflow.data.context", entry["context"])],
            )
            for entry in entries
        ],
    )


def _experiment(client: MlflowClient, uri: str, name: str) -> str:
    """The id of the experiment, made if there is none."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    folder = artifact_folder(uri)
    location = None if folder is None else f"{folder}/{_BAD_IN_FOLDERS.sub('_', name)}"
    return str(client.create_experiment(name, artifact_location=location))


def _merged(entries: list[dict[str, Any]], kind: str) -> dict[str, str]:
    """All values of a kind; a resumed run says them again, which MLflow refuses in one batch."""
    return {
        _name(key): value
        for entry in entries
        if entry["kind"] == kind
        for key, value in entry["values"].items()
    }


def _name(key: str) -> str:
    """The key without the characters that MLflow refuses in names."""
    return _BAD_IN_NAMES.sub("_", key)


def _parts(items: list[Any], most: int) -> Iterator[list[Any]]:
    return (items[start : start + most] for start in range(0, len(items), most))


def main(arguments: list[str]) -> int:
    """Copy until the log's end, or until training is gone; 0 if all of it was copied."""
    folder, uri, experiment, parent = Path(arguments[0]), *arguments[1:3], int(arguments[3])
    # One of an earlier, killed training may still be at work here.
    with (folder / _LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _copy_until_end(folder, uri, experiment, parent)


def _copy_until_end(folder: Path, uri: str, experiment: str, parent: int) -> int:
    state = read_state(folder)
    if state is None or (state.uri, state.experiment) != (uri, experiment):
        state = UploadState(uri=uri, experiment=experiment)
    uploader = Uploader(folder, state)
    pause_s, attempts_left = _POLL_S, ATTEMPTS_AT_END
    while not uploader.state.ended:
        orphaned = os.getppid() != parent
        try:
            copied = uploader.copy()
            if orphaned and not copied:
                uploader.end("KILLED")
                return 1
            pause_s = _POLL_S
        except Exception as error:  # A sink: any fault of the tracking is only reported.
            uploader.state.fault = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            uploader.save()
            attempts_left -= orphaned
            if attempts_left <= 0:
                return 1
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        time.sleep(pause_s)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
