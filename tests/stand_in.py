"""A stand-in of an engine, without vLLM: the replay's steps in real time, the real interfaces.

Its control socket and its page of metrics are the plug-in's own. It serves no requests: its traffic
is a trace. It never misbehaves (`faulty_links` do).

    python -m tests.stand_in --folder F --engines 8     # as a process; writes F/engines.json
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import numpy as np
import prometheus_client

from tests.waiting import free_port
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.trace import Trace
from trimtab.engine_bridge.vllm.control_server import ControlServer
from trimtab.engine_bridge.vllm.control_store import AllocationStore
from trimtab.engine_bridge.vllm.metrics import TierMetrics
from trimtab.training.traces.generate import generate

ENGINE: Final = "h100:llama-3.1-8b-tp1"
_OUTCOMES: Final = ("", "finished", "refused", "shed", "cancelled")


def traffic(
    *, load: float = 0.9, hours: float = 0.5, seed: int = 1, preset: str = "bursty"
) -> Trace:
    """Synthetic traffic for a stand-in."""
    return generate(hours=hours, seed=seed, preset=preset, load=load, spec=get_engine_spec(ENGINE))


@functools.cache
def _compile() -> None:
    """Compile the replay, if need be, before anybody's clock begins to run."""
    ReplayEngine(traffic(hours=0.02), load_plan(), get_engine_spec(ENGINE)).advance(1.0)


class StandIn:
    """An engine in real time: the replay's steps under the allocation of a real control socket.

    An interval is replayed when it has passed, under what held at its end.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan | Path | None = None,
        trace: Trace | None = None,
        *,
        name: str = "engine",
        engine: str = ENGINE,
        time_scale: float = 1.0,
        rank: str = "0",
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; `start`, or the `with` block, begins.

        Args:
            folder: Where `NAME.sock` is made.
            plan: A plan or its file; None: the shipped one. It has the control interval.
            trace: Traffic, seconds from the start; None: half an hour of `traffic()`.
            name: Of the socket.
            engine: Step-time model.
            time_scale: Length of a step over the model's.
            rank: Value of the label `engine`.
            wall_s: The engine's wall clock, seconds since 1970.
        """
        self.plan = plan if isinstance(plan, Plan) else load_plan(plan)
        self.control_path = folder / f"{name}.sock"
        self._trace = traffic() if trace is None else trace
        self._spec, self._time_scale = get_engine_spec(engine), time_scale
        _compile()
        self._rank, self._wall_s = rank, wall_s
        self._port = free_port()
        self._running = False

    @property
    def url(self) -> str:
        """Of the HTTP server."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def metrics_url(self) -> str:
        """Of the page of metrics."""
        return f"{self.url}/metrics"

    @property
    def target(self) -> str:
        """`host:port`, as Prometheus wants it."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> Self:
        """Begin at the engine's time 0, on the static plan, with all counters at 0."""
        self.store = AllocationStore(self.plan, capacity_max_num_seqs=self._spec.max_num_seqs)
        self.telemetry: Telemetry | None = None
        self._engine = ReplayEngine(self._trace, self.plan, self._spec, speed=self._time_scale)
        self._told = np.zeros(len(self._trace), np.bool_)
        # vLLM's page, which is read from files, has no series of creation times.
        prometheus_client.disable_created_metrics()
        registry = prometheus_client.CollectorRegistry()
        self._metrics = TierMetrics(
            self.plan,
            registry,
            engine=self._rank,
            start_id=self.store.start_id,
            wall_s=self._wall_s,
        )
        self._server, _ = prometheus_client.start_http_server(self._port, "127.0.0.1", registry)
        self._control = ControlServer(
            self.store,
            path=self.control_path,
            telemetry=lambda: self.telemetry,
            health=lambda: {
                "engine": self._spec.name,
                "plan": self.plan.name,
                "blocks": self._spec.num_gpu_blocks - 1,
            },
            switch_interval_s=None,
        ).start()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        self._running = True
        return self

    def close(self) -> None:
        """End, as an engine that is stopped: nobody listens any more."""
        if self._running:
            self._running = False
            self._ended.set()
            self._thread.join(10)
            self._control.close()
            self._server.shutdown()
            self._server.server_close()

    def restart(self) -> None:
        """Begin anew at the same addresses."""
        self.close()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _work(self) -> None:
        interval_s = float(self.plan.controller.interval_s)
        start_s, number = time.monotonic(), 0
        while True:
            number += 1
            if self._ended.wait(max(0.0, start_s + number * interval_s - time.monotonic())):
                return
            self._hold()
            telemetry = self.telemetry = self._engine.advance(interval_s)
            self._metrics.observe_interval(telemetry)
            self._metrics.observe_lease(self.store.describe().lease_left_s)
            self._tell_ends()

    def _hold(self) -> None:
        wish = self.store.take(time.monotonic())
        if wish is None:
            return
        # What was lawful in several steps may be too far for one.
        for _ in range(64):
            if self._engine.apply(wish, ttl_s=math.inf) == wish:
                return

    def _tell_ends(self) -> None:
        rows = self._engine.result().requests
        outcome = rows["outcome"]
        for row in np.flatnonzero((outcome != 0) & ~self._told).tolist():
            arrived_s, first_s = float(rows["arrival_s"][row]), float(rows["first_token_s"][row])
            last_s, tokens = float(rows["last_token_s"][row]), int(rows["output_tokens"][row])
            self._metrics.observe_finished(
                int(rows["tier"][row]),
                first_s - arrived_s,
                (last_s - first_s) / (tokens - 1) if tokens > 1 else None,
                last_s - arrived_s,
                float(rows["admitted_s"][row]) - arrived_s,
                _OUTCOMES[int(outcome[row])],
            )
            self._told[row] = True


def main(argv: list[str] | None = None) -> None:
    """Run stand-ins until SIGTERM; `engines.json` says where each one is."""
    parser = argparse.ArgumentParser(description="stand-ins of engines in a process of their own")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--plan", type=Path, help="default: the shipped one")
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--minutes", type=float, default=30.0, help="of traffic")
    parser.add_argument("--time-scale", type=float, default=1.0)
    flags = parser.parse_args(argv)
    logging.getLogger("trimtab.control").setLevel(logging.ERROR)
    trace = traffic(load=flags.load, hours=flags.minutes / 60)
    plan = load_plan(flags.plan)
    engines = [
        StandIn(flags.folder, plan, trace, name=f"e{number:02}", time_scale=flags.time_scale)
        for number in range(flags.engines)
    ]
    for engine in engines:
        engine.start()
    told = {
        engine.control_path.stem: {
            "control": str(engine.control_path),
            "metrics": engine.metrics_url,
            "target": engine.target,
        }
        for engine in engines
    }
    whole = flags.folder / "engines.json.part"
    whole.write_text(json.dumps(told))
    whole.rename(flags.folder / "engines.json")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    for engine in engines:
        engine.close()


if __name__ == "__main__":
    main()
