"""Compiled and interpreted replays are the same run, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.engine_bridge.replay.workloads import random_trace, small_engine
from dataclasses import replace
from trimtab.engine_bridge.draft_spec import DraftSpec
from trimtab.engine_bridge.plan import load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine

tiers = ("T0", "T1", "T2", "T3")
plan = with_values(load_plan(None), {f"tiers.{name}.draft_tokens": 3 for name in tiers})
draft = DraftSpec(tokens=3, pass_ms=0.2, acceptance=tuple((name, 0.6) for name in tiers), kept=0.9)
for rules in ("fair", "fcfs", "priority"):
    trace, spec = random_trace(7, requests=25), small_engine(seqs=3)
    for engine_spec in (spec, replace(spec, draft=draft)):
        engine = ReplayEngine(trace, plan, engine_spec, rules=rules)
        engine.run(interval_s=1.0)
        print(engine.result().digest())
"""


def digests(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_the_compiler_changes_nothing() -> None:
    compiled = digests()
    assert len(set(compiled)) == 6
    assert digests(NUMBA_DISABLE_JIT="1") == compiled
