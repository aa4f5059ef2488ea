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
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine

for rules in ("fair", "fcfs", "priority"):
    trace, spec = random_trace(7, requests=25), small_engine(seqs=3)
    engine = ReplayEngine(trace, load_plan(None), spec, rules=rules)
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
    assert len(set(compiled)) == 3
    assert digests(NUMBA_DISABLE_JIT="1") == compiled
