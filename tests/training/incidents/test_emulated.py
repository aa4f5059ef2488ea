"""The incidents on vLLM's own scheduler: the same verdicts, and nearly the same figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="runs vLLM's own scheduler")

from trimtab.training.incidents import emulated, poison_slices, replayed
from trimtab.training.incidents.incident import examine
from trimtab.training.incidents.suite import INCIDENTS

AS_BATCH = "sliced_"
"""Figures of D's run in slices as batch begin so. It is left to `trimtab incident D --engine
emulated`: it takes as long as two others, and the run among agents has four times the slices."""


@pytest.mark.slow
@pytest.mark.parametrize("key", INCIDENTS)
def test_the_real_scheduler_agrees(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison_slices, "stage", poison_slices.among_agents)
    figures = tuple(f for f in INCIDENTS[key].figures if not f.name.startswith(AS_BATCH))
    incident = replace(INCIDENTS[key], figures=figures)
    replay, real = (
        examine(incident, engine.serve, 0, beside=False) for engine in (replayed, emulated)
    )
    assert (real.reproduced, real.cured) == (replay.reproduced, replay.cured) == (True, True)
    for mine, theirs in zip(replay.findings, real.findings, strict=True):
        name = mine.figure.name
        assert theirs.before == pytest.approx(mine.before, rel=0.02, nan_ok=True), name
        assert theirs.after == pytest.approx(mine.after, rel=0.02, nan_ok=True), name
    for label, run in replay.runs.items():
        lost = run.served.timeline.preemptions.sum(0)
        assert real.runs[label].served.timeline.preemptions.sum(0) == pytest.approx(lost, abs=2)
