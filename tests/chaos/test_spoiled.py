"""A policy that gives no answer, and a wall clock that jumps, inside the daemon's process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="it comes with vLLM")

from tests.chaos.rig import SLACK_S, Rig, trial

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
Spoil = Callable[..., None]


@pytest.fixture(scope="module")
def spoil(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spoil]:
    """A daemon of its own, and what spoils it from now on; called without anything it is right."""
    file = tmp_path_factory.mktemp("spoil") / "spoil.json"

    def write(**how: object) -> None:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(how))
        part.rename(file)

    write()
    program = (sys.executable, "-m", "tests.chaos.spoiled_daemon", str(file))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    rig.start_daemon(program=program, env={"PYTHONPATH": path})
    yield write
    rig.end_daemon()


@pytest.mark.parametrize("how", ["raises", "hangs", "nan", "exits"])
def test_a_policy_that_gives_no_answer(rig: Rig, spoil: Spoil, how: str) -> None:
    assert rig.daemon is not None
    reason = "non_finite" if how == "nan" else "policy_failed"
    before = rig.daemon.state()["tally"]["reasons"][reason]
    with trial(rig, f"policy {how}") as tried:
        spoil(policy=how)
        tried.falls_back(3 * rig.interval_s + SLACK_S)
        state = tried.look(lambda state: state["tally"]["reasons"][reason] > before)
        assert state["contact"] == "controlling"
        # The guard fell back, not the engine for want of a controller.
        assert rig.watcher.now.leased
        spoil()
        tried.healed()


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_the_wall_clock_jumps(rig: Rig, spoil: Spoil, jump_s: float) -> None:
    with trial(rig, f"wall clock jumps by {jump_s / 3600:+.0f} h") as tried:
        spoil(clock_s=jump_s)
        tried.acts_on(6 * rig.interval_s)
        tried.look()
        spoil()
        tried.acts_on(4 * rig.interval_s)
        tried.healed()
