"""What the fair scheduler costs: CPU time of `schedule()` beside stock vLLM's on the same queue.

    python benchmarks/scheduler_overhead.py [--steps 300] [--rounds 5] [--json F]

Both are real vLLM schedulers (`AsyncScheduler` under its priority policy, `FairScheduler`) on the
same requests, with 32, 256 and 1,024 running and 0, 1,000 and 10,000 waiting at the batch cap. The
two take turns, block by block, in one process; a ratio is of medians over the rounds. `steady` is
decoding with a queue that cannot move; `turnover` ends one request every few steps, so that the
queue is looked at and somebody joins.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from statistics import median

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


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--running", type=int, nargs="*", default=RUNNING)
    parser.add_argument("--waiting", type=int, nargs="*", default=WAITING)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print("running waiting workload   stock us   fair us   ratio")
    for running in args.running:
        for waiting in args.waiting:
            for turnover in (False, True) if waiting else (False,):
                engines = {kind: make(kind, running, waiting) for kind in ("stock", "fair")}
                times: dict[str, list[float]] = {"stock": [], "fair": []}
                for engine in engines.values():
                    run(engine, WARM_UP_STEPS, turnover)
                for _ in range(args.rounds):
                    for kind, engine in engines.items():
                        times[kind].append(run(engine, args.steps, turnover)[0] * 1e6)
                stock, fair = median(times["stock"]), median(times["fair"])
                workload = "turnover" if turnover else "steady"
                print(
                    f"{running:7d} {waiting:7d} {workload:9s} {stock:9.1f} {fair:9.1f}"
                    f" {fair / stock:7.3f}",
                    flush=True,
                )
                rows.append(
                    {
                        "running": running,
                        "waiting": waiting,
                        "workload": workload,
                        "stock_us": stock,
                        "fair_us": fair,
                        "ratio": fair / stock,
                    }
                )
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
