"""The gate before an alias moves: four numbers, each with its bound, and the line that failed.

It judges figures that were measured elsewhere (`trimtab.training.evaluation`) and moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TIER_BOUND = -0.005
"""No tier's attainment may lose more than this: the lower end of its paired 95 % interval."""
WORST_BOUND = -0.02
"""On no trace may the weighted attainment fall by more than this, in the mean of its runs."""
FALLBACK_BOUND = 0.01
"""The guard may fall back to static in less than this share of the intervals."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A candidate against the static plan, paired on the same traces and seeds."""

    gain: float
    """Mean difference of weighted attainment, as a fraction of the demand."""
    gain_ci95: tuple[float, float]
    tiers_ci95: Mapping[str, tuple[float, float]]
    """Paired 95 % interval of each tier's difference of attainment; tiers without traffic left
    out."""
    worst: float
    """Mean difference of weighted attainment on the trace where it is least."""
    fallback_fraction: float
    """Share of the intervals in which the guard held the static plan instead."""


@dataclass(frozen=True, kw_only=True)
class GateLine:
    """One condition: what was measured, what was asked for; fractions."""

    name: str
    value: float
    must_be: Literal["above", "at least", "below"]
    bound: float
    unit: Literal["pp", "%"] = "pp"
    """Percentage points of attainment, or percent."""

    @property
    def passed(self) -> bool:
        """Whether the condition holds; a value that is no number never passes."""
        match self.must_be:
            case "above":
                return self.value > self.bound
            case "at least":
                return self.value >= self.bound
            case "below":
                return self.value < self.bound

    def __str__(self) -> str:
        """For people: `worst trace: -3.10 pp, must be at least -2.00 pp`."""
        return (
            f"{self.name}: {100 * self.value:+.2f} {self.unit}, must be {self.must_be} "
            f"{100 * self.bound:+.2f} {self.unit}"
        )


@dataclass(frozen=True, kw_only=True)
class GateReport:
    """All conditions, judged."""

    lines: tuple[GateLine, ...]

    @property
    def passed(self) -> bool:
        """Whether the model may be promoted."""
        return all(line.passed for line in self.lines)

    @property
    def failed(self) -> tuple[GateLine, ...]:
        """The lines that stand against it."""
        return tuple(line for line in self.lines if not line.passed)


def judge(measured: Measured, *, margin: float | None = None) -> GateReport:
    """Hold the figures against the gate.

    Args:
        measured: the candidate's figures.
        margin: with it a candidate passes that is not worse than static by more than this fraction
            (at least 0), instead of one that is better.
    """
    allowed = 0.0 if margin is None else -margin
    return GateReport(
        lines=(
            GateLine(
                name="gain over static, lower end of 95 %",
                value=measured.gain_ci95[0],
                must_be="above" if margin is None else "at least",
                bound=allowed,
            ),
            *(
                GateLine(
                    name=f"attainment of {name}, lower end of 95 %",
                    value=low,
                    must_be="at least",
                    bound=TIER_BOUND,
                )
                for name, (low, _) in measured.tiers_ci95.items()
            ),
            GateLine(
                name="worst trace", value=measured.worst, must_be="at least", bound=WORST_BOUND
            ),
            GateLine(
                name="share of intervals in fall-back",
                value=measured.fallback_fraction,
                must_be="below",
                bound=FALLBACK_BOUND,
                unit="%",
            ),
        )
    )
