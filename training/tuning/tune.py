"""Tuning from end to end: search, choose, and measure the gain on what the search has not seen.

It writes no file and prints nothing (see `trimtab.controller.cli.tune`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trimtab.agents.static import StaticPolicy
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.errors import PlanError
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.trace import Trace
from trimtab.training.evaluation.paired import Comparison, Evaluation, evaluate
from trimtab.training.evaluation.pool import Pool
from trimtab.training.tuning.objective import Case, Setting
from trimtab.training.tuning.search import Found, Order, Progress, Trial, search
from trimtab.training.tuning.space import Path, Space, changed, value_at
from trimtab.training.whatif.run import Contender, default_drain_s, drive

GIVEN, TUNED = "given", "tuned"
FINAL_VARIATIONS = 3
"""Variations of each trace on which the best trials meet again; fewer of many traces."""
_FINAL_CASES = 6
VALIDATION_VARIATIONS = 5
"""Variations of each trace on which the gain is measured."""
_FIRST_VALIDATION_SEED = 1000
_WARM_UP_REQUESTS = 2


@dataclass(frozen=True, kw_only=True)
class Change:
    """One value that tuning changed."""

    place: Path
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What tuning came to."""

    given: Plan
    plan: Plan
    """The best plan found; the given one where nothing was better."""
    changes: tuple[Change, ...]
    trials: tuple[Trial, ...]
    interrupted: bool
    evaluation: Evaluation | None
    """Both plans on traffic that the search has not seen; None where nothing was to be measured."""

    @property
    def gain(self) -> Comparison | None:
        """The tuned plan against the given one, on traffic that the search has not seen."""
        if self.evaluation is None:
            return None
        return self.evaluation.difference(TUNED, GIVEN)

    @property
    def shown(self) -> bool:
        """Whether the gain's interval lies above zero."""
        return self.gain is not None and self.gain.attainment.shown


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to tune, on what."""

    plan: Plan
    traces: Mapping[str, Trace]
    """The traffic to tune for, by name."""
    validation: Mapping[str, Trace]
    """The traffic to measure the gain on; empty: unseen variations of `traces`."""
    spec: EngineSpec
    trials: int
    seed: int
    variations: int
    """Of each trace in every trial; the first is the traffic as recorded."""


def tune(
    task: Task,
    *,
    processes: int | None = None,
    tell: Callable[[Progress], None] = lambda progress: None,
) -> Tuned:
    """Find the static plan that serves the traffic best, and measure what it gains.

    Equal arguments give the same plan, whatever the number of processes.

    Args:
        task: what to tune.
        processes: at most so many at once; None is one a CPU.
        tell: told of every trial, of every change undone, and of every run of the measurement.

    Raises:
        PlanError: a trace has a tier that the plan lacks, or the plan leaves nothing to tune.
        TrimtabError: Optuna is not installed, or a replay failed.
    """
    space = Space(task.plan, task.spec)
    _check(task, space)
    setting = Setting(
        plan=task.plan,
        traces=tuple(task.traces.values()),
        spec=task.spec,
        drain_s=default_drain_s(task.plan),
    )
    # Compiled once here: forked processes inherit it.
    head = setting.traces[0].head(_WARM_UP_REQUESTS)
    static = Contender(label=GIVEN, policy="static", plan=task.plan)
    drive(head, StaticPolicy(), static.plan, task.spec, seed=0, drain_s=1.0)
    found = _search(task, setting, space, processes, tell)
    plan = changed(task.plan, found.changes) if found.changes else task.plan
    evaluation, interrupted = None, found.interrupted
    if found.changes and not interrupted:
        try:
            evaluation = _measure(task, plan, processes, tell)
        except KeyboardInterrupt:
            interrupted = True
    return Tuned(
        given=task.plan,
        plan=plan,
        changes=tuple(
            Change(place=place, before=value_at(task.plan, place), after=value)
            for place, value in found.changes.items()
        ),
        trials=found.trials,
        interrupted=interrupted,
        evaluation=evaluation,
    )


def _check(task: Task, space: Space) -> None:
    for trace in (*task.traces.values(), *task.validation.values()):
        for name in trace.tier_names:
            task.plan.tier_index(name)
    if not space.dimensions:
        raise PlanError(
            f"plan {task.plan.name}",
            key="controller.bounds",
            bound="open for at least one knob",
            remedy="give a knob a ceiling above its floor and a greatest change",
        )


def _search(
    task: Task,
    setting: Setting,
    space: Space,
    processes: int | None,
    tell: Callable[[Progress], None],
) -> Found:
    def cases(first: int, count: int) -> tuple[Case, ...]:
        # Every trace first, then the variations: a trial may be pruned after a part of them.
        seeds = range(first, first + count)
        return tuple(Case(trace, seed) for seed in seeds for trace in range(len(setting.traces)))

    order = Order(
        trials=task.trials,
        seed=task.seed,
        cases=cases(0, task.variations),
        finals=cases(task.variations, min(FINAL_VARIATIONS, -(-_FINAL_CASES // len(task.traces)))),
    )

    with Pool(setting, processes=processes) as pool:
        return search(setting, space, order, pool=pool, tell=tell)


def _measure(
    task: Task, plan: Plan, processes: int | None, tell: Callable[[Progress], None]
) -> Evaluation:
    first = 0 if task.validation else _FIRST_VALIDATION_SEED
    traces = task.validation or task.traces
    total = 2 * len(traces) * VALIDATION_VARIATIONS
    done = 0

    def told() -> None:
        nonlocal done
        done += 1
        tell(Progress(done, total, "measuring the gain"))

    return evaluate(
        [
            Contender(label=GIVEN, policy="static", plan=task.plan),
            Contender(label=TUNED, policy="static", plan=plan),
        ],
        traces,
        spec=task.spec,
        seeds=range(first, first + VALIDATION_VARIATIONS),
        processes=processes,
        on_done=told,
    )
