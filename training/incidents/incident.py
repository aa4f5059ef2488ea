"""What an incident is: its traffic, its runs, and the bounds that its figures are held to.

The bounds are data in each incident's module. Nothing here serves or prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.engine import RuleSet
from trimtab.engine_bridge.trace import Trace
from trimtab.training.incidents.served import Serve, Served

Unit = Literal["s", "ms", "share", "times", "count", "tokens/s"]
BEFORE: Final = "before"
AFTER: Final = "after"
PRIORITY: Final = "before, priority"
"""Label of the run under vLLM's strict priority, which also knows the tiers."""
SLICED_BEFORE: Final = "before, in slices"
"""Label of the run under stock rules behind a gateway that reads long prompts in slices."""
SHIPPED: Final = "after, shipped plan"
"""Label of the run under the shipped plan, where the cure needs a change of it."""


@dataclass(frozen=True, kw_only=True)
class IncidentRun:
    """One run of an incident."""

    rules: RuleSet
    trace: Trace
    """What the engine was sent; slices of a request are not told apart."""
    plan: Plan
    spec: EngineSpec
    served: Served
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Requests that admission turned away before the engine, by the refusal's code."""


Runs = Mapping[str, IncidentRun]
"""All runs of an incident by label: `before`, `after`, and what these are measured against."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Where a figure must lie, the ends included."""

    low: float = -math.inf
    high: float = math.inf

    def holds(self, value: float) -> bool:
        """Whether the value lies inside; no value lies nowhere."""
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of an incident, and what it must be for the incident to be there, and to be cured.

    The measures get all runs; NaN where one of those that no bound is about was not made. None: the
    figure says nothing about that side.
    """

    name: str
    words: str
    unit: Unit
    before: Callable[[Runs], float] | None = None
    after: Callable[[Runs], float] | None = None
    reproduced: Bound | None = None
    """Where `before` must lie."""
    cured: Bound | None = None
    """Where `after` must lie."""
    why: str = ""
    """Why these bounds: one sentence."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One incident."""

    key: str
    """A letter."""
    title: str
    symptom: str
    """What was published of it."""
    stage: Callable[[Serve, int], Runs]
    """Makes the traffic of a seed and serves it, as far as the bounds need it."""
    beside: Callable[[Serve, int], Runs]
    """Likewise, runs that no bound is about."""
    figures: tuple[Figure, ...]
    traffic: str
    """The script in words."""
    remedy: str
    """What of Trimtab cures it."""
    shown: tuple[str, ...] = (BEFORE, AFTER)
    """Labels of the runs that the plots show."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A figure, measured."""

    figure: Figure
    before: float
    """NaN where the figure says nothing about it."""
    after: float
    reproduced: bool | None
    """Whether `before` lies inside its bound; None without one."""
    cured: bool | None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of an incident."""

    incident: Incident
    runs: Runs
    findings: tuple[Finding, ...]

    @property
    def reproduced(self) -> bool:
        """Whether stock rules show the published symptom."""
        return all(f.reproduced for f in self.findings if f.reproduced is not None)

    @property
    def cured(self) -> bool:
        """Whether it is gone under Trimtab."""
        return all(f.cured for f in self.findings if f.cured is not None)

    def figures_of(self, label: str) -> dict[str, float]:
        """The figures as they would be if the run of that label were `before`, or `after`."""
        fair = self.runs[label].rules == "fair"
        runs = {**self.runs, AFTER if fair else BEFORE: self.runs[label]}
        found = {}
        for figure in self.incident.figures:
            measure = figure.after if fair else figure.before
            if measure is not None:
                found[figure.name] = measure(runs)
        return found


def examine(incident: Incident, serve: Serve, seed: int, *, beside: bool = True) -> Verdict:
    """Run an incident and hold its figures to their bounds.

    Args:
        incident: The incident.
        serve: The engine.
        seed: Of the traffic.
        beside: Whether to make the runs too that no bound is about.
    """
    runs = dict(incident.stage(serve, seed))
    if beside:
        runs |= incident.beside(serve, seed)
    return Verdict(
        incident=incident,
        runs=runs,
        findings=tuple(_find(figure, runs) for figure in incident.figures),
    )


def _find(figure: Figure, runs: Runs) -> Finding:
    before = math.nan if figure.before is None else figure.before(runs)
    after = math.nan if figure.after is None else figure.after(runs)
    return Finding(
        figure=figure,
        before=before,
        after=after,
        reproduced=None if figure.reproduced is None else figure.reproduced.holds(before),
        cured=None if figure.cured is None else figure.cured.holds(after),
    )
