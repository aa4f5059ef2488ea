"""The record of a run: whole in its own log, copied to MLflow, and never in training's way."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimtab.engine_bridge.errors import FlagError
from trimtab.training.learning import tracking_place
from trimtab.training.learning.run_log import RunLog
from trimtab.training.learning.tracking import Tracking
from trimtab.training.learning.tracking_place import connect, shown
from trimtab.training.learning.tracking_place import tracking_uri as uri_of
from trimtab.training.learning.uploader import Uploader, UploadState, read_state

DIGEST = "ab" * 32


def fill(log: RunLog) -> None:
    log.params({"seed": 3, "odd (name)": "x" * 7000})
    log.tags({"command": "trimtab train"})
    log.dataset(name="t.parquet", digest=DIGEST, source="t.parquet", context="training", rows=9)
    for step in range(1500):
        log.metrics(step, {"train/loss": step / 2, "train/std": 0.3, "bad": float("nan")})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a-run"
    path.mkdir()
    (path / "policy.json").write_text("{}")
    return path


def test_everything_arrives_in_mlflow(tracking_uri: str, folder: Path) -> None:
    said: list[str] = []
    tracking = Tracking(folder, uri=tracking_uri, experiment="trials", say=said.append)
    fill(tracking.log)
    tracking.log.artifact("policy.json", under="bundle")
    run_id = tracking.finish("FINISHED")
    assert said == []
    assert run_id is not None
    client = connect(tracking_uri)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert client.get_experiment(run.info.experiment_id).name == "trials"
    assert run.data.params["seed"] == "3"
    assert len(run.data.params["odd _name_"]) == 6000
    assert run.data.tags["command"] == "trimtab train"
    assert run.data.metrics["train/loss"] == 1499 / 2
    assert "bad" not in run.data.metrics
    assert len(client.get_metric_history(run_id, "train/loss")) == 1500
    (used,) = run.inputs.dataset_inputs
    assert json.loads(used.dataset.source)["sha256"] == DIGEST
    assert [file.path for file in client.list_artifacts(run_id, "bundle")] == ["bundle/policy.json"]
    assert "run.jsonl" in {file.path for file in client.list_artifacts(run_id)}


def test_a_dead_server_is_said_once_and_stops_nothing(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    said: list[str] = []
    start_s = time.monotonic()
    tracking = Tracking(
        folder,
        uri=f"http://me:secret@127.0.0.1:{port}",
        experiment="x",
        say=said.append,
        grace_s=10.0,
    )
    fill(tracking.log)
    filled_s = time.monotonic() - start_s
    assert tracking.finish("FINISHED") is None
    tracking.watch()
    assert filled_s < 5.0, "writing waits for the server"
    assert len(said) == 1
    assert "secret" not in said[0]
    assert len((folder / "run.jsonl").read_text().splitlines()) == 1504


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_database_is_said_once(folder: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert_is_only_said(f"sqlite:///{closed / 'mlflow.db'}", folder)


def test_a_folder_in_the_database_s_place_is_said_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").mkdir()
    assert_is_only_said(f"sqlite:///{tmp_path / 'mlflow.db'}", folder)


def assert_is_only_said(uri: str, folder: Path) -> None:
    said: list[str] = []
    tracking = Tracking(folder, uri=uri, experiment="x", say=said.append, grace_s=4.0)
    fill(tracking.log)
    assert tracking.finish("FINISHED") is None
    assert len(said) == 1, said


def test_a_locked_database_delays_the_copy_only(tracking_uri: str, folder: Path) -> None:
    RunLog(folder, wall_s=lambda: 0.0).metrics(1, {"x": 1.0})
    uploader = Uploader(folder, UploadState(uri=tracking_uri, experiment="x"))
    uploader.copy()
    RunLog(folder, wall_s=lambda: 0.0).metrics(2, {"x": 2.0})
    # Another client, whose patience is shorter than MLflow's own.
    other = sqlite3.connect(tracking_uri.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    said: list[str] = []
    tracking = Tracking(folder, uri=tracking_uri, experiment="x", say=said.append, grace_s=1.0)
    assert tracking.finish("FINISHED") is None
    other.execute("ROLLBACK")
    other.close()
    again = Tracking(folder, uri=tracking_uri, experiment="x", say=said.append)
    run_id = again.finish("FINISHED")
    assert run_id == uploader.state.run_id
    history = connect(tracking_uri).get_metric_history(run_id, "x")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 2.0)]


def test_what_was_copied_is_not_copied_again(tracking_uri: str, folder: Path) -> None:
    log = RunLog(folder, wall_s=lambda: 5.0)
    log.metrics(1, {"x": 1.0})
    first = Uploader(folder, UploadState(uri=tracking_uri, experiment="x"))
    assert first.copy()
    assert not first.copy()
    log.metrics(2, {"x": 2.0})
    state = read_state(folder)
    assert state is not None
    assert Uploader(folder, state).copy()
    history = connect(tracking_uri).get_metric_history(state.run_id, "x")
    assert [m.step for m in history] == [1, 2]


def test_half_a_line_waits_for_its_end(tracking_uri: str, folder: Path) -> None:
    log = RunLog(folder, wall_s=lambda: 5.0)
    log.metrics(1, {"x": 1.0})
    with (folder / "run.jsonl").open("a") as file:
        file.write('{"kind": "metr')
    uploader = Uploader(folder, UploadState(uri=tracking_uri, experiment="x"))
    assert uploader.copy()
    assert not uploader.copy()


def test_a_run_whose_training_was_killed_is_marked(tracking_uri: str, folder: Path) -> None:
    RunLog(folder, wall_s=lambda: 5.0).metrics(1, {"x": 1.0})
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "trimtab.training.learning.uploader",
         str(folder), tracking_uri, "x", gone],
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    state = read_state(folder)
    assert state is not None
    assert connect(tracking_uri).get_run(state.run_id).info.status == "KILLED"


def test_a_full_disk_does_not_raise(folder: Path) -> None:
    shutil.rmtree(folder)
    log = RunLog(folder, wall_s=lambda: 0.0)
    log.metrics(1, {"x": 1.0})
    assert log.fault is not None


def test_the_default_place_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert uri_of(tmp_path) == f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///runs.db")
    assert uri_of(tmp_path) == f"sqlite:///{tmp_path / 'runs.db'}"


@pytest.mark.parametrize("uri", ["file:/tmp/mlruns", "mlruns", "ftp://host"])
def test_a_store_that_mlflow_refuses_is_refused_at_once(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(FlagError, match="MLFLOW_TRACKING_URI"):
        uri_of(Path())


def test_a_password_is_not_shown() -> None:
    assert shown("https://me:secret@host/x") == "https://me:***@host/x"
    assert shown("sqlite:////a/b.db") == "sqlite:////a/b.db"


def test_mlflow_sends_no_telemetry(tracking_uri: str) -> None:
    connect(tracking_uri)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert tracking_place.DEFAULT_EXPERIMENT == "trimtab"
