"""Contenders against each other on the same traffic: levels, gains, intervals, the worst trace.

Every contender plays every (trace, speed of the engine, variation), so that each difference is
taken on the same arrivals. Results do not depend on the number of processes. The resampling is in
`bootstrap`; nothing here decides whether a gain is good enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trimtab.agents.registry import make_policy
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.errors import PlanError
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.trace import Trace
from trimtab.training.evaluation.bootstrap import Gain, Samples, gain
from trimtab.training.evaluation.play import Served, play
from trimtab.training.evaluation.pool import Pool
from trimtab.training.whatif.run import Contender, default_drain_s, drive

FloatArray = npt.NDArray[np.float64]

_WARM_UP_REQUESTS = 2


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One contender minus another one."""

    label: str
    against: str
    attainment: Gain
    """Weighted attainment, difference of fractions."""
    goodput: Gain
    """Weighted goodput, relative: 0.01 is one percent more than the other one's."""
    tiers: Mapping[str, Gain]
    """Attainment by tier, difference of fractions; tiers without a request are left out."""
    by_trace: Mapping[str, float]
    """Mean difference of weighted attainment on each trace."""

    @property
    def worst_trace(self) -> str:
        """The trace with the least difference, of several the first."""
        return min(self.by_trace, key=lambda name: self.by_trace[name])

    @property
    def worst(self) -> float:
        """The difference on that trace."""
        return self.by_trace[self.worst_trace]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What every contender served; axes are traces, speeds, seeds."""

    tiers: tuple[str, ...]
    traces: tuple[str, ...]
    speeds: tuple[float, ...]
    seeds: tuple[int, ...]
    served: Mapping[str, npt.NDArray[np.object_]]
    """By label the `Served` of each run, shape (traces, speeds, seeds)."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The contenders, in the order in which they were given."""
        return tuple(self.served)

    def attainment(self, label: str) -> FloatArray:
        """Weighted attainment of each run, shape (traces, speeds, seeds)."""
        return self._each(label, lambda run: run.weighted_attainment)

    def mean(self, label: str) -> float:
        """Mean weighted attainment over all runs; NaN where nothing was demanded."""
        return _mean(self.attainment(label))

    def tier_attainment(self, label: str) -> dict[str, float]:
        """Mean over the runs of each tier's attainment; tiers without a request are NaN."""
        found = self._each(label, lambda run: run.tier_attainment)
        return {name: _mean(found[..., place]) for place, name in enumerate(self.tiers)}

    def fallback_fraction(self, label: str) -> float:
        """Mean share of control intervals that the guard took over; NaN without a guard."""
        return _mean(self._each(label, lambda run: run.fallback_fraction))

    def select(
        self, *, traces: Sequence[str] | None = None, speeds: Sequence[float] | None = None
    ) -> Evaluation:
        """The same evaluation of some traces and speeds only; None keeps all."""
        rows = [self.traces.index(name) for name in (self.traces if traces is None else traces)]
        columns = [self.speeds.index(x) for x in (self.speeds if speeds is None else speeds)]
        return replace(
            self,
            traces=tuple(self.traces[row] for row in rows),
            speeds=tuple(self.speeds[column] for column in columns),
            served={k: runs[np.ix_(rows, columns)] for k, runs in self.served.items()},
        )

    def difference(
        self, label: str, against: str, *, families: Mapping[str, str] | None = None
    ) -> Comparison:
        """What `label` gained over `against`, with 95 % intervals of a paired bootstrap.

        Args:
            label: the contender.
            against: the one that it is measured against.
            families: family of each trace; traces are then drawn inside their family only, so that
                the interval is that of these families, not of others like them. None: one family.

        Raises:
            KeyError: no contender of that label took part.
        """
        family = [(families or {}).get(name, "") for name in self.traces]

        def taken(
            top: Callable[[Served], FloatArray], bottom: Callable[[Served], FloatArray]
        ) -> Samples:
            return Samples(
                ours=self._each(label, top),
                theirs=self._each(against, top),
                bottom=self._each(label, bottom),
                families=family,
            )

        attained = taken(lambda run: run.met_demand, lambda run: run.demand)
        tokens = self._each(against, lambda run: run.met_tokens)
        goodput = replace(
            taken(lambda run: run.met_tokens, lambda run: run.met_tokens), bottom=tokens
        )
        by_trace = np.array([_mean(row) for row in attained.differences()])
        return Comparison(
            label=label,
            against=against,
            attainment=gain(attained),
            goodput=gain(goodput),
            tiers={
                name: gain(
                    taken(
                        lambda run, row=place: run.met_requests[row],  # type: ignore[misc]
                        lambda run, row=place: run.requests[row],  # type: ignore[misc]
                    )
                )
                for place, name in enumerate(self.tiers)
                if any(run.requests[place].any() for run in self._runs(label))
            },
            by_trace=dict(zip(self.traces, by_trace.tolist(), strict=True)),
        )

    def _each(self, label: str, figure: Callable[[Served], object]) -> FloatArray:
        flat = np.array([figure(run) for run in self._runs(label)], np.float64)
        return flat.reshape(*self.served[label].shape, *flat.shape[1:])

    def _runs(self, label: str) -> list[Served]:
        return list(self.served[label].ravel().tolist())


@dataclass(frozen=True)
class _Setting:
    contenders: tuple[Contender, ...]
    traces: tuple[Trace, ...]
    spec: EngineSpec
    by: Plan
    drain_s: float


def evaluate(
    contenders: Sequence[Contender],
    traces: Mapping[str, Trace],
    *,
    spec: EngineSpec,
    seeds: Sequence[int] = (0,),
    speeds: Sequence[float] = (1.0,),
    by: Plan | None = None,
    drain_s: float | None = None,
    processes: int | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Play every contender on every trace, speed and variation.

    Args:
        contenders: policies under plans of the same tiers, each with a label of its own.
        traces: the traffic by name.
        spec: the engine as its step-time model knows it.
        seeds: variations of each trace (`trimtab.training.whatif.variation`), 0 as recorded.
        speeds: true step time over the model's; above 1 the engine has become slower.
        by: whose targets and values measure every contender; None is the first one's plan.
        drain_s: how long after the last arrival a run may go on; None is twice the longest target.
        processes: at most so many at once; None is one a CPU.
        on_done: told of each run that is done.

    Raises:
        PlanError: a trace has a tier that a plan lacks, or the plans' tiers differ.
        TrimtabError: a run failed.
    """
    by = contenders[0].plan if by is None else by
    _check_tiers([by, *(contender.plan for contender in contenders)], traces)
    setting = _Setting(
        contenders=tuple(contenders),
        traces=tuple(traces.values()),
        spec=spec,
        by=by,
        drain_s=default_drain_s(by) if drain_s is None else drain_s,
    )
    shape = (len(contenders), len(traces), len(speeds), len(seeds))
    runs = np.empty(shape, np.object_)
    jobs = [
        (contender, trace, speeds[speed], seeds[seed])
        for contender, trace, speed, seed in np.ndindex(*shape)
    ]
    if processes != 1:
        # Compiled once here: forked workers inherit it, spawned ones find it in the cache.
        head = setting.traces[0].head(_WARM_UP_REQUESTS)
        first = contenders[0]
        drive(head, make_policy(first.policy), first.plan, spec, seed=0, drain_s=1.0)
    with Pool(setting, processes=processes) as pool:
        for place, served in zip(np.ndindex(*shape), pool.map(_play, jobs), strict=True):
            runs[place] = served
            on_done()
    return Evaluation(
        tiers=by.tier_names,
        traces=tuple(traces),
        speeds=tuple(speeds),
        seeds=tuple(seeds),
        served={contender.label: runs[row] for row, contender in enumerate(contenders)},
    )


def _play(setting: _Setting, job: tuple[int, int, float, int]) -> Served:
    contender, trace, speed, seed = job
    return play(
        setting.traces[trace],
        setting.contenders[contender],
        setting.spec,
        by=setting.by,
        seed=seed,
        drain_s=setting.drain_s,
        speed=speed,
    )


def _check_tiers(plans: Sequence[Plan], traces: Mapping[str, Trace]) -> None:
    for plan in plans:
        if plan.tier_names != plans[0].tier_names:
            raise PlanError(
                f"plan {plan.name}",
                key="tiers",
                value=", ".join(plan.tier_names),
                bound=f"those of plan {plans[0].name}, {', '.join(plans[0].tier_names)}",
                remedy="give plans of the same tiers, in the same order",
            )
        for trace in traces.values():
            for name in trace.tier_names:
                plan.tier_index(name)


def _mean(values: FloatArray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")
