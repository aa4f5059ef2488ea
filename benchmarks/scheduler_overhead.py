"""What the fair scheduler costs: CPU time of `schedule()` beside stock vLLM's on the same queue.

    python benchmarks/scheduler_overhead.py [--steps 60] [--rounds 15] [--json F]

Both are real vLLM schedulers (`AsyncScheduler` under its priority policy, `FairScheduler`) on the
same requests, with 32, 256 and 1,024 running and 0, 1,000 and 10,000 waiting at the batch cap. Each
has a process of its own, as in a server; the two take turns, block by block. `ratio` is of medians
over the rounds, `least` of the fastest blocks. `steady` is decoding with a queue that cannot move;
`turnover` ends one request every few steps, so that the queue is looked at and somebody joins.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.trace import Trace
from trimtab.engine_bridge.vllm.virtual_time import (
    StockScheduler,
    VirtualClock,
    VirtualVllm,
)

RUNNING, WAITING = (32, 256, 1024), (0, 1000, 10_000)
ENGINE = "h100:llama-3.1-8b-tp1"
TENANTS = 50
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 100_000
TURNOVER_STEPS = 4
WARM_UP_STEPS = 40


def make(kind: str, running: int, waiting: int) -> VirtualVllm:
    """An engine with that many decodes in its batch and that many requests in its queue."""
    rng = np.random.default_rng(running + waiting)
    count = running + waiting
    trace = Trace.build(
        arrival_s=np.zeros(count),
        prompt_tokens=np.full(count, PROMPT_TOKENS),
        output_tokens=np.full(count, OUTPUT_TOKENS),
        tier=np.where(np.arange(count) < running, 0, rng.integers(0, 4, count)),
        tenant=rng.integers(0, TENANTS, count),
        tier_names=("T0", "T1", "T2", "T3"),
        tenant_names=tuple(f"tenant-{n}" for n in range(TENANTS)),
    )
    spec = get_engine_spec(ENGINE).with_limits(
        max_num_seqs=running, max_num_batched_tokens=8192, num_gpu_blocks=200_000
    )
    plan = load_plan(None)
    # Not before `virtual_time`, which tells vLLM that there is no GPU.
    from trimtab.engine_bridge.vllm import FairScheduler

    fair = kind == "fair"
    engine = VirtualVllm(
        trace,
        plan,
        spec,
        scheduler_class=FairScheduler if fair else StockScheduler,
        policy="priority",
        additional_config={"trimtab": {"engine": ENGINE}} if fair else None,
        prepare=(lambda s, now: s.use_clock(VirtualClock(now))) if fair else None,
    )
    while len(engine.scheduler.running) < running or any(
        request.is_prefill_chunk for request in engine.scheduler.running
    ):
        engine.step()
    return engine


def run(engine: VirtualVllm, steps: int, turnover: bool) -> tuple[float, float]:
    """CPU seconds of `schedule()` a step, and of the whole scheduler, over some steps."""
    scheduler = engine.scheduler
    spent = {"schedule": 0.0}
    inner = scheduler.schedule

    def timed(*args: object, **kwargs: object) -> object:
        start = time.thread_time()
        output = inner(*args, **kwargs)
        spent["schedule"] += time.thread_time() - start
        return output

    scheduler.schedule = timed
    gc.collect()
    gc.disable()
    start = time.thread_time()
    for step in range(steps):
        if turnover and step % TURNOVER_STEPS == 0 and scheduler.running:
            engine.cancel(engine.running[step % len(engine.running)])
        engine.step()
    whole = time.thread_time() - start
    gc.enable()
    del scheduler.schedule
    return spent["schedule"] / steps, whole / steps


class Worker(NamedTuple):
    """A process with one scheduler, which runs a block of steps when it is told how many."""

    pipe: Connection
    process: multiprocessing.process.BaseProcess

    @classmethod
    def start(cls, kind: str, running: int, waiting: int, turnover: bool) -> Worker:
        """Start one; it answers once when it is warm."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(
            target=serve, args=(there, kind, running, waiting, turnover), daemon=True
        )
        process.start()
        return cls(here, process)

    def ask(self, steps: int) -> float:
        """CPU microseconds of `schedule()` a step over that many."""
        self.pipe.send(steps)
        return float(self.pipe.recv())

    def stop(self) -> None:
        """End the process."""
        self.pipe.send(0)
        self.process.join()


def serve(pipe: Connection, kind: str, running: int, waiting: int, turnover: bool) -> None:
    """What a worker's process does."""
    engine = make(kind, running, waiting)
    run(engine, WARM_UP_STEPS, turnover)
    pipe.send(True)
    while steps := pipe.recv():
        pipe.send(run(engine, steps, turnover)[0] * 1e6)


def compare(
    running: int, waiting: int, turnover: bool, steps: int, rounds: int
) -> dict[str, float | str]:
    """One row of the table."""
    workers = {kind: Worker.start(kind, running, waiting, turnover) for kind in ("stock", "fair")}
    for worker in workers.values():
        worker.pipe.recv()
    times: dict[str, list[float]] = {kind: [] for kind in workers}
    for _ in range(rounds):
        for kind, worker in workers.items():
            times[kind].append(worker.ask(steps))
    for worker in workers.values():
        worker.stop()
    stock, fair = times["stock"], times["fair"]
    return {
        "running": running,
        "waiting": waiting,
        "workload": "turnover" if turnover else "steady",
        "stock_us": median(stock),
        "fair_us": median(fair),
        "ratio": median(fair) / median(stock),
        "least_ratio": min(fair) / min(stock),
    }


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--running", type=int, nargs="*", default=RUNNING)
    parser.add_argument("--waiting", type=int, nargs="*", default=WAITING)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print("running waiting workload   stock us   fair us   ratio  least")
    for running in args.running:
        for waiting in args.waiting:
            for turnover in (False, True) if waiting else (False,):
                row = compare(running, waiting, turnover, args.steps, args.rounds)
                rows.append(row)
                print(
                    "{running:7d} {waiting:7d} {workload:9s} {stock_us:9.1f} {fair_us:9.1f}"
                    " {ratio:7.3f} {least_ratio:6.3f}".format(**row),
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
