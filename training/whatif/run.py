"""Run a what-if: every contender on every seed, in processes if there are several, and compare.

Results do not depend on the number of processes. It prints nothing and writes no file.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

from trimtab.agents.guard import Guard
from trimtab.agents.policy import Policy
from trimtab.agents.registry import make_policy
from trimtab.engine_bridge.capacity import offered_load
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.errors import TrimtabError
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.replay.report import ReplayResult
from trimtab.engine_bridge.trace import Trace
from trimtab.training.diagnosis.observed import of_run
from trimtab.training.diagnosis.signs import Signs, signs_of
from trimtab.training.whatif import compare, metrics, series
from trimtab.training.whatif.encoding import encoder_notes, measure_media
from trimtab.training.whatif.schema import GuardFacts, RunResult, TraceFacts, WhatIfResult
from trimtab.training.whatif.slicing import in_slices
from trimtab.training.whatif.variation import vary

Columns = dict[str, npt.NDArray[np.generic]]

LEAST_DRAIN_S = 600.0
ENGINE_LIMITS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_gpu_blocks",
    "block_size",
    "enable_prefix_caching",
)
"""What of an engine a what-if may change, and reports."""
_WARM_UP_REQUESTS = 2


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What is compared: a policy under a plan."""

    label: str
    policy: str
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Study:
    """A what-if to run. All contenders are measured by the targets and values of `plan`."""

    trace: Trace
    plan: Plan
    contenders: tuple[Contender, ...]
    spec: EngineSpec
    seeds: tuple[int, ...] = (0,)
    drain_s: float
    """How long after the trace's last arrival a run may go on until all requests ended."""
    keep_requests: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """One contender, one seed, done."""

    label: str
    seed: int
    result: RunResult
    judged: metrics.Judged
    series: series.Series
    requests: Columns | None
    """Columns of the replay's requests where the study keeps them."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All that a what-if found: the figures, and what only plots and tables need."""

    result: WhatIfResult
    runs: tuple[Run, ...]
    load: series.Load
    study: Study


def default_drain_s(plan: Plan) -> float:
    """Twice the plan's longest target, at least ten minutes."""
    targets = [
        target
        for tier in plan.tiers.values()
        for target in (tier.targets.ttft_ms, tier.targets.e2e_ms)
        if target is not None
    ]
    return max(LEAST_DRAIN_S, 2 * max(targets, default=0.0) / 1e3)


def run_study(
    study: Study, *, processes: int | None = None, on_done: Callable[[Run], None] = lambda run: None
) -> Outcome:
    """Run all contenders on all seeds and compare them.

    Args:
        study: what to run.
        processes: at most so many at once; None is one a CPU.
        on_done: told of each run, in the order of contenders, then seeds.

    Raises:
        PlanError: the trace has a tier that a plan lacks.
        TrimtabError: a run failed.
    """
    for contender in study.contenders:
        for name in study.trace.tier_names:
            contender.plan.tier_index(name)
    jobs = [(c, seed) for c in study.contenders for seed in study.seeds]
    runs = []
    for run in _run_all(study, jobs, processes or os.cpu_count() or 1):
        on_done(run)
        runs.append(run)
    return _outcome(study, runs)


def drive(
    trace: Trace,
    policy: Policy,
    plan: Plan,
    spec: EngineSpec,
    *,
    seed: int,
    drain_s: float,
    speed: float = 1.0,
) -> ReplayResult:
    """One run: the policy acts once a control interval until all ended or the drain is over.

    Args:
        trace: The traffic.
        policy: Is reset first.
        plan: Of the engine and the policy.
        spec: The engine.
        seed: Of the policy.
        drain_s: Longest time after the last arrival, seconds.
        speed: True step time over the model's; above 1 the engine has become slower.
    """
    policy.reset(plan, seed)
    sliced = in_slices(trace, plan, spec)
    engine = ReplayEngine(sliced.trace, plan, spec, rules=policy.engine_rules, speed=speed)
    controller = plan.controller
    limit_s = trace.duration_s + drain_s
    while not engine.finished and engine.due_s < limit_s:
        telemetry = engine.advance(min(controller.interval_s, limit_s - engine.due_s))
        engine.apply(policy.act(telemetry), ttl_s=controller.lease_s)
    result = engine.result()
    # A slice shows no media.
    encode_ms = result.encode_ms[sliced.last]
    return replace(result, requests=sliced.fold(result.requests), encode_ms=encode_ms)


def run_one(study: Study, contender: Contender, seed: int) -> Run:
    """Replay one contender on one seed and take its figures."""
    trace = vary(study.trace, seed)
    by = metrics.yardstick(trace, study.plan)
    policy = make_policy(contender.policy)
    result = drive(trace, policy, contender.plan, study.spec, seed=seed, drain_s=study.drain_s)
    judged = metrics.judge(result, by)
    economics = metrics.measure_economics(result, judged, by, contender.plan, study.spec)
    tiers = metrics.measure_tiers(result, judged, by, economics)
    arrival_s = result.requests["arrival_s"]
    return Run(
        label=contender.label,
        seed=seed,
        result=RunResult(
            policy=contender.label,
            seed=seed,
            tiers=tiers,
            engine=metrics.measure_engine(result, tiers, judged, by),
            fairness=metrics.measure_fairness(result, by, fair_rules=policy.engine_rules == "fair"),
            economics=economics,
            guard=_guard_facts(policy),
            signs=_signs(result, trace, study, fair_rules=policy.engine_rules == "fair"),
            speculation=metrics.measure_drafts(result, contender.plan),
            media=measure_media(result, trace, contender.plan),
        ),
        judged=judged,
        series=series.over_time(
            result.telemetry,
            plan=contender.plan,
            total_blocks=study.spec.num_gpu_blocks,
            attainment=series.attainment_over_time(
                np.where(np.isfinite(arrival_s), arrival_s, trace.arrival_s),
                by.tier,
                judged.met.every,
                tiers=len(study.plan.tiers),
                duration_s=trace.duration_s,
            ),
        ),
        requests=dict(result.requests) if study.keep_requests else None,
    )


def _signs(result: ReplayResult, trace: Trace, study: Study, *, fair_rules: bool) -> Signs | None:
    seen = of_run(result, trace)
    if not len(seen):
        return None
    return signs_of(
        seen,
        study.plan,
        study.spec,
        fair_rules=fair_rules,
        telemetry=result.telemetry,
        counts=result.drafts,
    )


def _guard_facts(policy: Policy) -> GuardFacts | None:
    if not isinstance(policy, Guard):
        return None
    tally = policy.tally
    return GuardFacts(
        intervals=tally.intervals,
        fell_back=tally.fell_back,
        trips=tally.trips,
        latched=tally.latched,
        reasons={str(reason): count for reason, count in tally.reasons.items() if count},
    )


def _run_all(study: Study, jobs: Sequence[tuple[Contender, int]], processes: int) -> Iterator[Run]:
    if processes == 1 or len(jobs) == 1:
        yield from (run_one(study, contender, seed) for contender, seed in jobs)
        return
    # Compiled once here: forked workers inherit it, spawned ones find it in the cache.
    contender = study.contenders[0]
    policy = make_policy(contender.policy)
    few = study.trace.head(_WARM_UP_REQUESTS)
    drive(few, policy, contender.plan, study.spec, seed=0, drain_s=1.0)
    method = "fork" if sys.platform == "linux" else "spawn"
    try:
        with ProcessPoolExecutor(
            max_workers=min(processes, len(jobs)),
            mp_context=multiprocessing.get_context(method),
            initializer=_adopt,
            initargs=(study,),
        ) as pool:
            yield from pool.map(_run_adopted, jobs)
    except BrokenProcessPool as fault:
        raise TrimtabError("a worker process died, perhaps for want of memory") from fault


_adopted: Study | None = None


def _adopt(study: Study) -> None:
    """Keep the study in this worker, so that the trace is handed over once, not once a run."""
    global _adopted
    _adopted = study


def _run_adopted(job: tuple[Contender, int]) -> Run:
    if _adopted is None:
        raise RuntimeError("the worker was not given its study")
    return run_one(_adopted, *job)


def _outcome(study: Study, runs: Sequence[Run]) -> Outcome:
    pairs = {
        seed: compare.paired(metrics.yardstick(vary(study.trace, seed), study.plan))
        for seed in study.seeds
    }
    by_label = {
        contender.label: [
            (pairs[run.seed], run.judged) for run in runs if run.label == contender.label
        ]
        for contender in study.contenders
    }
    facts = trace_facts(study)
    return Outcome(
        result=WhatIfResult(
            engine=study.spec.name,
            plan=study.plan.name,
            trace=facts,
            tiers=metrics.tier_facts(study.plan),
            results=tuple(run.result for run in runs),
            differences=compare.differences(by_label),
            drain_s=study.drain_s,
            engine_limits={name: getattr(study.spec, name) for name in ENGINE_LIMITS},
            fidelity=dict(study.spec.fidelity),
            draft=None if study.spec.draft is None else asdict(study.spec.draft),
            encoder=None if study.spec.encoder is None else asdict(study.spec.encoder),
        ),
        runs=tuple(runs),
        load=series.offered(
            study.trace,
            metrics.yardstick(study.trace, study.plan).tier,
            len(study.plan.tiers),
            study.spec,
            mean_load=facts.offered_load,
        ),
        study=study,
    )


def trace_facts(study: Study) -> TraceFacts:
    """Which traffic a study replays."""
    trace = study.trace
    return TraceFacts(
        digest=trace.digest(),
        requests=len(trace),
        duration_s=trace.duration_s,
        offered_load=offered_load(trace, study.spec),
        notes=(*trace.notes, *encoder_notes(trace, study.spec)),
    )
