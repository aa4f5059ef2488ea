"""Runs fleets side by side: every fleet under every policy with every seed, in processes.

Results do not depend on the number of processes. It prints nothing and writes no file.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from trimtab.agents.registry import make_policy
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.errors import TrimtabError
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.trace import Trace
from trimtab.training.fleet.figures import FleetResult, measure
from trimtab.training.fleet.run import FleetReplay
from trimtab.training.fleet.settings import Fleet, FleetSettingsError
from trimtab.training.whatif import metrics
from trimtab.training.whatif.variation import vary


@dataclass(frozen=True, kw_only=True)
class FleetStudy:
    """What is compared."""

    trace: Trace
    plan: Plan
    fleets: tuple[Fleet, ...]
    specs: tuple[Mapping[str, EngineSpec], ...]
    """By fleet, by engine."""
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    drain_s: float


def specs_of(fleet: Fleet, where: str) -> dict[str, EngineSpec]:
    """The engines of a fleet by name.

    Args:
        fleet: The fleet.
        where: Its file, for errors.

    Raises:
        EngineSpecError: there is no such engine.
        FleetSettingsError: engines that share a store keep their KV cache in other forms.
    """
    specs = {name: get_engine_spec(_near(own.engine, where)) for name, own in fleet.engines.items()}
    forms = {(spec.model, spec.block_size, spec.kv_bytes_per_token) for spec in specs.values()}
    if fleet.store is not None and len(forms) > 1:
        raise FleetSettingsError(
            where,
            key="store",
            value=", ".join(sorted({spec.name for spec in specs.values()})),
            bound="engines of one model and one KV form",
            remedy="leave the store out, or give all engines the same model",
        )
    return specs


def _near(engine: str, where: str) -> str:
    """An engine file beside the fleet's file counts from there."""
    beside = Path(where).parent / engine
    return str(beside) if Path(engine).suffix and beside.is_file() else engine


def run_fleets(
    study: FleetStudy,
    *,
    processes: int | None = None,
    on_done: Callable[[FleetResult], None] = lambda result: None,
) -> tuple[FleetResult, ...]:
    """Run all of it.

    Args:
        study: What to run.
        processes: At most so many at once; None is one a CPU.
        on_done: Told of each run, in the order of fleets, policies, seeds.
    """
    jobs = [
        (fleet, policy, seed)
        for fleet in range(len(study.fleets))
        for policy in study.policies
        for seed in study.seeds
    ]
    results = []
    for result in _run_all(study, jobs, processes or os.cpu_count() or 1):
        on_done(result)
        results.append(result)
    return tuple(results)


Job = tuple[int, str, int]


def run_one(study: FleetStudy, job: Job) -> FleetResult:
    """Run one fleet under one policy with one seed."""
    number, policy, seed = job
    fleet, specs = study.fleets[number], study.specs[number]
    trace = vary(study.trace, seed)
    replay = FleetReplay(
        trace,
        fleet,
        study.plan,
        specs,
        lambda: make_policy(policy),
        seed=seed,
        drain_s=study.drain_s,
    )
    return measure(
        replay.run(),
        metrics.yardstick(trace, study.plan),
        specs,
        fleet=fleet.name,
        policy=policy,
        seed=seed,
    )


def _run_all(study: FleetStudy, jobs: list[Job], processes: int) -> Iterator[FleetResult]:
    if processes == 1 or len(jobs) == 1:
        yield from (run_one(study, job) for job in jobs)
        return
    # Compiled once here: forked workers inherit it, spawned ones find it in the cache.
    yield run_one(study, jobs[0])
    method = "fork" if sys.platform == "linux" else "spawn"
    try:
        with ProcessPoolExecutor(
            max_workers=min(processes, len(jobs) - 1),
            mp_context=multiprocessing.get_context(method),
            initializer=_adopt,
            initargs=(study,),
        ) as pool:
            yield from pool.map(_run_adopted, jobs[1:])
    except BrokenProcessPool as fault:
        raise TrimtabError(
            "a worker process died, perhaps for want of memory; try fewer --jobs"
        ) from fault


_adopted: FleetStudy | None = None


def _adopt(study: FleetStudy) -> None:
    """Keep the study in this worker, so that the trace is handed over once, not once a run."""
    global _adopted
    _adopted = study


def _run_adopted(job: Job) -> FleetResult:
    if _adopted is None:
        raise RuntimeError("the worker was not given its study")
    return run_one(_adopted, job)
