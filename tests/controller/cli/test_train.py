"""`trimtab train` and `promote`: traces to champion, kills, refusals; all parts are real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.learning.conftest import *  # noqa: F403 - the same MLflow
from trimtab.agents.bundle import read_bundle
from trimtab.agents.learned import LearnedPolicy
from trimtab.controller.cli import app as root
from trimtab.engine_bridge.plan import Plan
from trimtab.training.learning.tracking_place import connect
from trimtab.training.traces.canonical_write import write_trace
from trimtab.training.traces.generate import generate

Cli = Callable[..., int]
TINY = ("--steps", 512, "--envs", 2, "--window-s", 60, "--plan", "default")
PATIENCE_S = 400.0
"""A process may have to compile the replay first."""


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traffic") / "mine.parquet"
    write_trace(generate(hours=0.05, seed=3, load=0.8), path)
    return path


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tracking_uri: str) -> Cli:
    monkeypatch.chdir(tmp_path)
    return lambda *words: root.main([str(word) for word in words])


def progress(run: Path) -> dict[str, Any]:
    (checkpoint,) = (run / "checkpoints").glob("[0-9]*")
    return dict(json.loads((checkpoint / "progress.json").read_text()))


def steps_logged(run: Path) -> list[int]:
    entries = map(json.loads, (run / "run.jsonl").read_text().splitlines())
    return [e["step"] for e in entries if e["kind"] == "metrics" and "time/fps" in e["values"]]


def test_a_run_leaves_a_bundle_and_can_be_repeated(
    cli: Cli, traffic: Path, tmp_path: Path, tracking_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("train", "--trace", traffic, *TINY, "--seed", 5, "--out", "a") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"tracking: {tracking_uri}"
    assert err == ""
    assert cli("train", "--trace", traffic, *TINY, "--seed", 5, "--out", "b") == 0
    assert cli("train", "--trace", traffic, *TINY, "--seed", 6, "--out", "c") == 0
    a, b, c = (read_bundle(tmp_path / name).digest for name in "abc")
    assert a == b
    assert a != c
    assert a in out
    client = connect(tracking_uri)
    experiment = client.get_experiment_by_name("trimtab")
    run = next(r for r in client.search_runs([experiment.experiment_id]) if r.info.run_name == "a")
    assert run.info.status == "FINISHED"
    assert run.data.params["seed"] == "5"
    assert run.data.tags["bundle_digest"] == a
    assert "validation/gain_low" in run.data.metrics
    assert "reward/goodput" in run.data.metrics
    assert len(run.inputs.dataset_inputs) == 1
    kept = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert kept >= {"bundle", "inputs", "evaluation.json", "run.jsonl"}


def test_from_traces_to_a_champion_that_whatif_knows(
    cli: Cli, traffic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("train", "--trace", traffic, *TINY, "--out", "a", "--register", "chat") == 0
    assert "registered: models:/chat/1" in capsys.readouterr().out
    held_out = tmp_path / "later.parquet"
    write_trace(generate(hours=0.03, seed=9, load=0.5), held_out)
    judged = ("promote", "--model", "chat", "--plan", "default", "--seeds", 1, "--jobs", 1)
    code = cli(*judged, "--trace", held_out, "--allow-equal", 100, "--json", "gate.json")
    out, err = capsys.readouterr()
    # Half a thousand steps teach nothing, so the tiers' lines may fail; then the alias stays.
    assert code in (0, 1)
    assert ("promoted: models:/chat@champion is version 1" in out) == (code == 0)
    assert ("is not promoted" in err) == (code == 1)
    assert json.loads((tmp_path / "gate.json").read_text())["metrics"]
    assert cli(*judged, "--trace", traffic) == 2
    assert "was not trained on" in capsys.readouterr().err
    assert cli(*judged[:2], "chta", "--trace", held_out) == 2
    assert 'did you mean "chat"' in capsys.readouterr().err


def test_another_algorithm_ends_in_a_bundle_too(
    cli: Cli, traffic: Path, tmp_path: Path, default_plan: Plan
) -> None:
    assert cli("train", "--trace", traffic, *TINY, "--algorithm", "sac", "--out", "a") == 0
    policy = LearnedPolicy(read_bundle(tmp_path / "a"))
    policy.reset(default_plan, 0)
    assert policy.bundle.training["algorithm"] == "SAC"
    assert not (tmp_path / "a" / "replay-buffer").exists()


def test_a_champion_in_one_go_or_the_line_that_failed(
    cli: Cli, traffic: Path, tracking_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "--trace", traffic, *TINY, "--out", "a", "--register", "chat", "--promote")
    # Half a thousand steps teach nothing: the gain is not above zero.
    assert cli(*words) == 1
    err = capsys.readouterr().err
    assert "models:/chat/1 is not promoted: gain over static" in err
    assert "champion" not in dict(connect(tracking_uri).get_registered_model("chat").aliases)


def test_a_kill_loses_at_most_a_rollout(
    cli: Cli, traffic: Path, tmp_path: Path, tracking_uri: str
) -> None:
    flags = ("--trace", traffic, "--steps", 2048, "--envs", 2, "--window-s", 60, "--out", "a")
    words = [str(word) for word in ("train", *flags, "--plan", "default")]
    process = subprocess.Popen(
        [sys.executable, "-m", "trimtab.controller.cli.app", *words],
        cwd=tmp_path, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    run = tmp_path / "a"
    wait_for(lambda: len(list((run / "checkpoints").glob("[0-9]*"))) == 1, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    reached = progress(run)["step"]
    assert 0 < reached < 2048
    assert cli(*words) == 2, "an unfinished run was overwritten"
    before = len(steps_logged(run))
    assert cli(*words, "--resume") == 0
    # The first report after the resumption is of the rollout after the checkpoint.
    assert steps_logged(run)[before] == reached + 512
    assert progress(run) | {"finished": True, "step": 2048} == progress(run)
    assert read_bundle(run).digest
    assert cli(*words, "--seed", 1, "--resume") == 2


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < end_s, "nothing happened"
        time.sleep(0.01)


def test_ctrl_c_keeps_the_best_so_far(traffic: Path, tmp_path: Path, tracking_uri: str) -> None:
    words = [str(w) for w in ("train", "--trace", traffic, "--steps", 10**6, "--envs", 2,
                              "--window-s", 60, "--out", "a", "--plan", "default")]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "trimtab.controller.cli.app", *words],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    run = tmp_path / "a"
    wait_for(lambda: any((run / "checkpoints").glob("[0-9]*")), process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "interrupted at step" in out
    # A busy machine may have more to say: that the copy of the record is late.
    assert err.splitlines()[0] == "trimtab: stopping; once more to stop at once"
    assert read_bundle(run).digest in out
    assert progress(run)["finished"] is False


def test_an_outage_of_the_tracking_stops_nothing(
    cli: Cli, traffic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert cli("train", "--trace", traffic, *TINY, "--out", "a") == 0
    assert capsys.readouterr().err.count("trimtab: tracking at") == 1
    assert read_bundle(tmp_path / "a").digest


def test_what_an_outage_left_is_registered_by_resuming(
    cli: Cli, traffic: Path, tmp_path: Path, tracking_uri: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = ("train", "--trace", traffic, *TINY, "--out", "a", "--register", "chat")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert cli(*words) == 2
    assert "--resume" in capsys.readouterr().err
    digest = read_bundle(tmp_path / "a").digest
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
    assert cli(*words, "--resume") == 0
    assert "registered: models:/chat/1" in capsys.readouterr().out
    assert read_bundle(tmp_path / "a").digest == digest


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--algorithm", "PP0"), 'did you mean "PPO"'),
        (("--steps", 0), "--steps"),
        (("--promote",), "--register"),
        (("--plan", "defualt"), "defualt"),
    ],
)
def test_wrong_flags_are_one_line(
    cli: Cli, traffic: Path, flags: tuple[object, ...], line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert cli("train", "--trace", traffic, "--out", "a", *flags) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
