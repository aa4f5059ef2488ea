"""Paired evaluation of the policy of the moment against the static plan, on fixed windows.

The same windows, speeds and variations each time, through the bundle as it would be served, so
that two validations differ by the policy only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.trace import Trace
from trimtab.training.evaluation.paired import Comparison, Evaluation, evaluate
from trimtab.training.learning.promotion import Measured
from trimtab.training.whatif.run import Contender

STATIC, LEARNED = "static", "learned"


@dataclass(frozen=True, kw_only=True)
class Validation:
    """One policy against the static plan."""

    comparison: Comparison
    evaluation: Evaluation

    @property
    def gain(self) -> float:
        """Mean difference of weighted attainment."""
        return self.comparison.attainment.mean

    @property
    def low(self) -> float:
        """Lower end of its 95 % interval."""
        return self.comparison.attainment.ci95[0]

    def measured(self) -> Measured:
        """What the gate judges."""
        return Measured(
            gain=self.gain,
            gain_ci95=self.comparison.attainment.ci95,
            tiers_ci95={name: gain.ci95 for name, gain in self.comparison.tiers.items()},
            worst=self.comparison.worst,
            fallback_fraction=self.evaluation.fallback_fraction(LEARNED),
        )

    def metrics(self) -> dict[str, float]:
        """Figures for the run's log."""
        low, high = self.comparison.attainment.ci95
        return {
            "validation/gain": self.gain,
            "validation/gain_low": low,
            "validation/gain_high": high,
            "validation/worst": self.comparison.worst,
            "validation/attainment": self.evaluation.mean(LEARNED),
            "validation/attainment_static": self.evaluation.mean(STATIC),
            "validation/fallback_fraction": self.evaluation.fallback_fraction(LEARNED),
            **{
                f"validation/{name}/gain": gain.mean for name, gain in self.comparison.tiers.items()
            },
        }

    def content(self) -> dict[str, Any]:
        """The report, as JSON holds it."""
        # JSON has no NaN; what is not known is left out.
        return {
            "metrics": {k: v for k, v in self.metrics().items() if math.isfinite(v)},
            "tiers_ci95": {n: list(g.ci95) for n, g in self.comparison.tiers.items()},
            "by_trace": dict(self.comparison.by_trace),
        }


class Validator:
    """Plays policies on the same traffic; the static plan only once."""

    def __init__(
        self,
        windows: Mapping[str, Trace],
        *,
        plan: Plan,
        spec: EngineSpec,
        seeds: Sequence[int] = (0,),
        processes: int | None = None,
    ) -> None:
        """Keep what every validation shares.

        Args:
            windows: the traffic by name.
            plan: the plan of both sides.
            spec: the engine that is replayed.
            seeds: variations of the traffic.
            processes: at most so many at once; None is one a CPU.
        """
        self._windows = windows
        self._plan = plan
        self._spec = spec
        self._seeds = tuple(seeds)
        self._processes = processes
        self._static: Evaluation | None = None

    def validate(self, bundle: Path) -> Validation:
        """The policy of a bundle's folder against the static plan.

        Raises:
            BundleError: the bundle does not fit the plan.
        """
        if self._static is None:
            self._static = self._play(STATIC, "static")
        own = self._play(LEARNED, f"bundle:{bundle}")
        both = replace(own, served={**own.served, **self._static.served})
        return Validation(comparison=both.difference(LEARNED, STATIC), evaluation=both)

    def _play(self, label: str, policy: str) -> Evaluation:
        return evaluate(
            [Contender(label=label, policy=policy, plan=self._plan)],
            self._windows,
            spec=self._spec,
            seeds=self._seeds,
            processes=self._processes,
        )
