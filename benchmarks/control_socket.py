"""How soon a controller's allocation holds: over the control socket, beside a busy engine.

    python benchmarks/control_socket.py [--sets N] [--step-ms MS] [--json F]

A thread steps like an engine's scheduler: it takes from the store, computes in plain Python for a
part of the step, and waits for the rest, as it waits for the GPU. A client in a process of its own
sets one allocation after the other. Round trip: from the request to the answer. Apply: from the
request to the step that takes it; it cannot be below half a step. `idle` computes nothing, `busy` a
fifth of the step, `hog` all of it: a bound that no engine reaches.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.vllm.control_client import ControlClient
from trimtab.engine_bridge.vllm.control_server import ControlServer
from trimtab.engine_bridge.vllm.control_store import AllocationStore

PAUSE_S = 0.01
WARM_UP = 20


def client(path: str, sets: int, results: Connection) -> None:
    """Set allocation after allocation; send (version, asked at, answered at) for each."""
    found = []
    with ControlClient(path, timeout_s=10.0) as control:
        for number in range(sets + WARM_UP):
            budget = 6000 + number % 2 * 100
            asked_s = time.monotonic()
            answer = control.set({"prefill_budget_tokens": budget}, holder="benchmark")
            found.append((answer["version"], asked_s, time.monotonic()))
            time.sleep(PAUSE_S)
    results.send(found[WARM_UP:])


class Engine(threading.Thread):
    """Takes from the store at the start of each step and notes when it saw which version."""

    def __init__(self, store: AllocationStore, step_s: float, computing: float) -> None:
        """Prepare to step every `step_s` seconds, computing for a part of it."""
        super().__init__(daemon=True)
        self.seen: dict[int, float] = {}
        self.take_s: list[float] = []
        self._store, self._step_s = store, step_s
        self._computing_s = step_s * computing
        self.stopping = False

    def run(self) -> None:
        """Step until `stopping`."""
        while not self.stopping:
            now_s = time.monotonic()
            allocation = self._store.take(now_s)
            self.take_s.append(time.monotonic() - now_s)
            if allocation is not None:
                self.seen[allocation.version] = now_s
            while time.monotonic() < now_s + self._computing_s:
                sum(range(50))
            left_s = now_s + self._step_s - time.monotonic()
            if left_s > 0:
                time.sleep(left_s)


def measure(sets: int, step_ms: float, computing: float) -> dict[str, float]:
    """Percentiles in milliseconds of one run."""
    store = AllocationStore(load_plan())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "control.sock"
        engine = Engine(store, step_ms * 1e-3, computing)
        with ControlServer(store, path=path):
            engine.start()
            here, there = mp.Pipe()
            process = mp.get_context("spawn").Process(target=client, args=(str(path), sets, there))
            process.start()
            found = here.recv()
            process.join()
            time.sleep(4 * step_ms * 1e-3)
            engine.stopping = True
            engine.join()
    round_trip = [answered - asked for _, asked, answered in found]
    apply = [engine.seen[v] - asked for v, asked, _ in found if v in engine.seen]
    return {
        "sets": len(found),
        "seen": len(apply),
        **_percentiles("round_trip", np.array(round_trip)),
        **_percentiles("apply", np.array(apply)),
        "take_us_p50": float(np.median(engine.take_s) * 1e6),
    }


def _percentiles(name: str, seconds: npt.NDArray[np.float64]) -> dict[str, float]:
    return {f"{name}_ms_p{p}": float(np.percentile(seconds, p) * 1e3) for p in (50, 99)}


def main() -> None:
    """Measure beside an idle, a busy and a hogging engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = {
        name: measure(args.sets, args.step_ms, computing)
        for name, computing in (("idle", 0.0), ("busy", 0.2), ("hog", 1.0))
    }
    for name, row in rows.items():
        print(name, "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    if args.json:
        args.json.write_text(json.dumps({"step_ms": args.step_ms, **rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
