"""Paired differences between the runs of a what-if, each with its 95 % interval.

Which metrics are compared, and over which samples; the bootstrap itself is in `statistics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from trimtab.training.whatif.metrics import Judged, Yardstick
from trimtab.training.whatif.schema import Difference
from trimtab.training.whatif.statistics import (
    BINS,
    Interval,
    RatioSample,
    ValueSample,
    quantile_difference,
    ratio_difference,
    time_bins,
)
from trimtab.training.whatif.variation import session_rows

FloatArray = npt.NDArray[np.float64]

_BOOTSTRAP_SEED = 20_231


@dataclass(frozen=True, kw_only=True)
class Paired:
    """What one seed's runs share: the yardstick and each request's time bin."""

    by: Yardstick
    bins: npt.NDArray[np.int64]


Runs = Sequence[tuple[Paired, Judged]]
"""One label's runs, by seed."""


def paired(by: Yardstick) -> Paired:
    """Put every request into the time bin of its session's start, so that sessions stay whole."""
    start_s = by.trace.arrival_s[session_rows(by.trace)]
    return Paired(by=by, bins=time_bins(start_s, by.trace.duration_s))


def reference_label(labels: Sequence[str]) -> str:
    """What the others are compared against: `static` where present, else the first."""
    return "static" if "static" in labels else labels[0]


def differences(runs: Mapping[str, Runs]) -> tuple[Difference, ...]:
    """All differences against the reference, by label, then metric."""
    against = reference_label(list(runs))
    found = []
    for label in runs:
        if label == against:
            continue
        for metric, interval in _metrics(runs[label], runs[against]):
            found.append(
                Difference(
                    policy=label,
                    against=against,
                    metric=metric,
                    mean=interval.mean,
                    ci95=(interval.low, interval.high),
                )
            )
    return tuple(found)


def _metrics(ours: Runs, theirs: Runs) -> list[tuple[str, Interval]]:
    def ratio(sample: Callable[[Paired, Judged], RatioSample]) -> Interval:
        return ratio_difference(
            [(sample(*a), sample(*b)) for a, b in zip(ours, theirs, strict=True)],
            rng=np.random.default_rng(_BOOTSTRAP_SEED),
        )

    found = [
        ("weighted_attainment", ratio(_weighted_attainment)),
        ("weighted_goodput", ratio(_weighted_goodput)),
    ]
    by = ours[0][0].by
    for index, name in enumerate(by.plan.tiers):
        if not np.any(by.tier == index):
            continue
        found.append((f"{name}.attainment", ratio(partial(_attainment, tier=index))))
        p99 = quantile_difference(
            [
                (_ttft(*a, tier=index), _ttft(*b, tier=index))
                for a, b in zip(ours, theirs, strict=True)
            ],
            q=0.99,
            rng=np.random.default_rng(_BOOTSTRAP_SEED),
        )
        found.append((f"{name}.ttft_p99_ms", p99))
    return found


def _weighted_attainment(paired: Paired, judged: Judged) -> RatioSample:
    demand = paired.by.demand
    return RatioSample(
        numerator=_by_bin(paired, demand * judged.met.every), denominator=_by_bin(paired, demand)
    )


def _weighted_goodput(paired: Paired, judged: Judged) -> RatioSample:
    by = paired.by
    worth = by.values[by.tier] * by.trace.output_tokens * judged.met.every
    return RatioSample(
        numerator=_by_bin(paired, worth), denominator=np.full(BINS, by.window_s / BINS)
    )


def _attainment(paired: Paired, judged: Judged, *, tier: int) -> RatioSample:
    mine = paired.by.tier == tier
    return RatioSample(
        numerator=_by_bin(paired, (mine & judged.met.every).astype(np.float64)),
        denominator=_by_bin(paired, mine.astype(np.float64)),
    )


def _ttft(paired: Paired, judged: Judged, *, tier: int) -> ValueSample:
    mine = paired.by.tier == tier
    return ValueSample(values=judged.seen.ttft_ms[mine], bins=paired.bins[mine])


def _by_bin(paired: Paired, weights: FloatArray) -> FloatArray:
    return np.bincount(paired.bins, weights=weights, minlength=BINS).astype(np.float64)
