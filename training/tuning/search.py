"""The search for a better static plan: Optuna's TPE and steps from the best plan so far, in turns.

Trials are proposed, pruned and told in rounds of a fixed size, so that what is found depends on the
seed and not on the number of processes. The given plan is trial 0. The best trials of the search
meet again on variations that the search has not seen, with the given plan among them: the best
of many trials owes a part of its score to luck. What the winner changes for nothing is then undone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trimtab.engine_bridge.errors import TrimtabError
from trimtab.training.evaluation.pool import Pool
from trimtab.training.tuning.objective import Case, Setting, play_case, score
from trimtab.training.tuning.space import Dimension, Path, Space

if TYPE_CHECKING:
    import optuna

ROUND = 4
"""Trials proposed together; a constant, because results must not depend on the machine."""
FINALISTS = 4
_FIRST_PART = 3
"""A trial plays one in so many of its cases before it may be pruned."""
_UNPRUNED = 8
"""Trials before the first pruning."""
_GUIDED_FROM = 12
"""Until then every trial is a step from the best: TPE's first guesses would be blind."""
_STEP = 0.15
"""Standard deviation of a step along an axis, as a part of its length."""
_MOST_STEPS = 4
_SPARED = 0.1
"""Changes are undone while all of them together cost at most this part of the winner's gain."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One plan that was tried."""

    number: int
    changes: dict[Path, float]
    """What it changes of the given plan."""
    score: float
    """Mean over the cases that it played."""
    pruned: bool


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to."""

    trials: tuple[Trial, ...]
    changes: dict[Path, float]
    """What the winner changes of the given plan; empty where nothing was better."""
    interrupted: bool


@dataclass(frozen=True)
class Progress:
    """How far a part of the work is."""

    done: int
    total: int
    doing: str


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to search with."""

    trials: int
    seed: int
    cases: tuple[Case, ...]
    """Played by every trial that is not pruned, in this order."""
    finals: tuple[Case, ...]
    """Played by the best trials and the given plan, to choose between them."""


def search(
    setting: Setting,
    space: Space,
    order: Order,
    *,
    pool: Pool[Setting],
    tell: Callable[[Progress], None] = lambda progress: None,
) -> Found:
    """Search until all trials are played or the user interrupts.

    Args:
        setting: plan, traffic and engine.
        space: what may be changed.
        order: how many trials, on which cases.
        pool: where they are played; it shares `setting`.
        tell: told of every trial, and of every change that it tries to undo.

    Raises:
        TrimtabError: Optuna is not installed, or a replay failed.
    """
    done: list[Trial] = []
    tell(Progress(0, order.trials, "the given plan"))
    try:
        study = _study(order.seed)
        rng = np.random.default_rng([order.seed, 0x7E])
        while len(done) < order.trials:
            count = min(ROUND, order.trials - len(done))
            asked = [_ask(study, space, len(done) + place, done, rng) for place in range(count)]
            for trial in _play_round(study, asked, setting, order.cases, pool):
                done.append(trial)
                tell(Progress(len(done), order.trials, f"best {_best(done).score:.4f}"))
        changes = _final(done, setting, space, order.finals, pool, tell)
    except KeyboardInterrupt:
        if not done:
            raise
        return Found(trials=tuple(done), changes=_best(done).changes, interrupted=True)
    return Found(trials=tuple(done), changes=changes, interrupted=False)


_Asked = tuple["optuna.Trial", dict[Path, float]]


def _study(seed: int) -> optuna.Study:
    try:
        import optuna
    except ImportError as error:
        raise TrimtabError(
            f"{error.name} is not installed; install the extra: pip install 'trimtab[train]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        # Parts of the sampler that Optuna calls experimental, for years now.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=0, multivariate=True, constant_liar=True
        )
    pruner = optuna.pruners.MedianPruner(n_startup_trials=_UNPRUNED, n_warmup_steps=0)
    return optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)


def _ask(
    study: optuna.Study,
    space: Space,
    number: int,
    done: Sequence[Trial],
    rng: np.random.Generator,
) -> _Asked:
    if number == 0:
        study.enqueue_trial(space.start)
    elif number < _GUIDED_FROM or number % 2:
        best = study.trials[_best(done).number].params if done else space.start
        study.enqueue_trial(_step(best, space.dimensions, rng))
    trial = study.ask()
    point = {
        axis.name: trial.suggest_float(axis.name, axis.low, axis.high, log=axis.log)
        for axis in space.dimensions
    }
    return trial, space.changes(point)


def _step(
    point: dict[str, float], axes: Sequence[Dimension], rng: np.random.Generator
) -> dict[str, float]:
    """A point near another one: one to four axes moved."""
    moved = dict(point)
    count = min(int(rng.integers(1, _MOST_STEPS + 1)), len(axes))
    for place in rng.choice(len(axes), count, replace=False):
        axis = axes[int(place)]
        low, high, at = axis.low, axis.high, point[axis.name]
        if axis.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        at = float(np.clip(at + rng.normal(0.0, _STEP) * (high - low), low, high))
        at = math.exp(at) if axis.log else at
        moved[axis.name] = min(max(at, axis.low), axis.high)
    return moved


def _play_round(
    study: optuna.Study,
    asked: Sequence[_Asked],
    setting: Setting,
    cases: Sequence[Case],
    pool: Pool[Setting],
) -> list[Trial]:
    """Play the first part of the cases with all trials, then the rest with those worth it."""
    part = -(-len(cases) // _FIRST_PART)
    first = _scores(setting, [changes for _, changes in asked], cases[:part], pool)
    for (trial, _), scores in zip(asked, first, strict=True):
        trial.report(_mean(scores), step=0)
    # Asked only after all have reported: an order of reports would be an order of processes.
    pruned = [len(cases) > part and trial.should_prune() for trial, _ in asked]
    kept = [changes for (_, changes), out in zip(asked, pruned, strict=True) if not out]
    rest = iter(_scores(setting, kept, cases[part:], pool))
    found = []
    for (trial, changes), scores, out in zip(asked, first, pruned, strict=True):
        mean = _mean(scores if out else [*scores, *next(rest)])
        _tell(study, trial, mean, pruned=out)
        found.append(Trial(number=trial.number, changes=changes, score=mean, pruned=out))
    return found


def _tell(study: optuna.Study, trial: optuna.Trial, value: float, *, pruned: bool) -> None:
    from optuna.trial import TrialState

    if pruned:
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, value)


def _final(
    done: Sequence[Trial],
    setting: Setting,
    space: Space,
    finals: Sequence[Case],
    pool: Pool[Setting],
    tell: Callable[[Progress], None],
) -> dict[Path, float]:
    """The changes of the best finalist, without those that do not matter."""
    ranked = sorted((t for t in done if not t.pruned), key=lambda t: (-t.score, t.number))
    # The given plan first: where nothing is better, it wins.
    chosen = [done[0], *(trial for trial in ranked[:FINALISTS] if trial is not done[0])]
    tell(Progress(0, len(space.knobs), "choosing between the best"))
    means = _means(setting, [trial.changes for trial in chosen], finals, pool)
    best = max(range(len(chosen)), key=lambda place: means[place])
    changes = dict(chosen[best].changes)
    least = means[best] - _SPARED * (means[best] - means[0])
    for number, knob in enumerate(space.knobs):
        tell(Progress(number, len(space.knobs), "undoing what does not matter"))
        fewer = {path: value for path, value in changes.items() if path not in knob}
        if len(fewer) < len(changes) and _means(setting, [fewer], finals, pool)[0] >= least:
            changes = fewer
    return changes


def _means(
    setting: Setting,
    plans: Sequence[dict[Path, float]],
    cases: Sequence[Case],
    pool: Pool[Setting],
) -> list[float]:
    return [_mean(scores) for scores in _scores(setting, plans, cases, pool)]


def _scores(
    setting: Setting,
    plans: Sequence[dict[Path, float]],
    cases: Sequence[Case],
    pool: Pool[Setting],
) -> list[list[float]]:
    """The scores of each plan on each case."""
    jobs = [(changes, case) for changes in plans for case in cases]
    played = (score(served, setting.plan) for served in pool.map(play_case, jobs))
    return [[next(played) for _ in cases] for _ in plans]


def _best(done: Sequence[Trial]) -> Trial:
    return max((trial for trial in done if not trial.pruned), key=lambda t: (t.score, -t.number))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
