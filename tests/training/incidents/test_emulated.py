"""The incidents on vLLM's own scheduler: the same verdicts, and nearly the same figures."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="runs vLLM's own scheduler")

from trimtab.training.incidents import emulated, replayed
from trimtab.training.incidents.incident import examine
from trimtab.training.incidents.suite import INCIDENTS

EVICTED = "sliced_"
"""Figures of a run whose slices are evicted and read again, with this beginning: there one decision
that falls the other way (accounts are summed in another order) changes all that follow."""


@pytest.mark.slow
@pytest.mark.parametrize("key", INCIDENTS)
def test_the_real_scheduler_agrees(key: str) -> None:
    replay, real = (
        examine(INCIDENTS[key], engine.serve, 0, beside=False) for engine in (replayed, emulated)
    )
    assert (real.reproduced, real.cured) == (replay.reproduced, replay.cured) == (True, True)
    for mine, theirs in zip(replay.findings, real.findings, strict=True):
        name = mine.figure.name
        near = 0.1 if name.startswith(EVICTED) else 0.02
        assert theirs.before == pytest.approx(mine.before, rel=near, nan_ok=True), name
        assert theirs.after == pytest.approx(mine.after, rel=near, nan_ok=True), name
    for label, run in replay.runs.items():
        lost = run.served.timeline.preemptions.sum(0)
        assert real.runs[label].served.timeline.preemptions.sum(0) == pytest.approx(lost, abs=2)
