"""Rule 9 over time: each tier's measured acceptance, and the draft length that follows from it.

One record a tier (`layout.DRAFTING`), the same for the replay and for vLLM. A tier whose drafts are
a loss goes to 0 and probes now and then, at fixed steps, so that it notices when they would pay
again. It makes no drafts and knows no requests: `replay.verification` tells what was verified.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.rules.speculation import best_drafts, tokens_per_step

PROBE_STEPS: Final = 64
"""A tier whose length is 0 verifies one draft a request in one of so many steps."""
SETTLE_STEPS: Final = 16
"""Steps between two changes of a tier's length."""
MARGIN: Final = 0.01
"""Share of the batch's rate that a change must win."""
_MEMORY_TOKENS: Final = 96.0
"""Verified drafts that an estimate looks back on, with fewer than that in one step."""
_LEAST_KEPT, _LEAST_KEPT_PROBING = 0.94, 0.5
"""Part of what is known that a step leaves at least: one step of many requests is one sample of
what they are doing now. Probes are rare, and each counts for more."""
_PRIOR: Final = 0.6
_PRIOR_TOKENS: Final = 4.0
_SMOOTHING: Final = 1 / 16


def begin(drafting: Any) -> None:
    """Nothing is known of any tier: a guess that a few tokens outweigh."""
    drafting.known_verified[:] = _PRIOR_TOKENS
    drafting.known_accepted[:] = _PRIOR * _PRIOR_TOKENS
    drafting.since[:] = SETTLE_STEPS
    drafting.step_tokens[:] = 1.0


def allow(drafting: Any, most: npt.ArrayLike) -> None:
    """Longest lengths by tier hold; where they differ from before, a tier begins with them."""
    wished = np.asarray(most, np.int64)
    changed = wished != drafting.most
    drafting.length[changed] = wished[changed]
    # What holds from the start need not settle first.
    drafting.since[changed & (drafting.most > 0)] = 0
    drafting.most[:] = wished


@compiled
def acceptance(tier: Any) -> float:
    """Share of a tier's first drafts that are accepted, as far as it is known, in [0, 1]."""
    return min(1.0, tier.known_accepted / tier.known_verified)


@compiled
def length_now(tier: Any, steps: int) -> int:
    """Draft tokens that a request of the tier verifies in the next step."""
    if tier.length == 0 and tier.most > 0 and steps % PROBE_STEPS == 0:
        return 1
    return int(tier.length)


@compiled
def observe(tier: Any, kept: float, drafted: int, accepted: int) -> None:
    """A request has verified `drafted` tokens, of which the first `accepted` were right.

    Drafts after the first wrong one tell nothing. Later places count for what is expected of them.
    """
    weight = 1.0
    for _ in range(min(drafted, accepted + 1)):
        tier.verified += weight
        weight *= kept
    tier.accepted += accepted


@compiled
def _learn(tier: Any) -> None:
    """Take a step's drafts into what is known."""
    if tier.verified == 0.0:
        return
    least = _LEAST_KEPT_PROBING if tier.length == 0 else _LEAST_KEPT
    keep = max(least, 1.0 - tier.verified / _MEMORY_TOKENS)
    tier.known_verified = keep * tier.known_verified + tier.verified
    tier.known_accepted = keep * tier.known_accepted + tier.accepted
    tier.verified = 0.0
    tier.accepted = 0.0


@compiled
def choose(
    coef: npt.NDArray[np.float64],
    drafting: Any,
    tiers: Any,
    facts: npt.NDArray[np.float64],
    smoothed: npt.NDArray[np.float64],
    cost: npt.NDArray[np.float64],
    kept: float,
    steps: int,
) -> None:
    """A step is over: choose the lengths of the next one.

    Args:
        coef: The step-time model's coefficients.
        drafting: One record a tier.
        tiers: One record a tier; `decoding` tells its decodes.
        facts: The step without drafts, as for `speculation.verified_step_ms`.
        smoothed: The same over the last steps, kept here.
        cost: As for `speculation.best_drafts`.
        kept: Part of the acceptance that is left at the next place.
        steps: Steps chosen for before this one.
    """
    rate = _SMOOTHING if steps > 0 else 1.0
    for at in range(len(facts)):
        smoothed[at] += rate * (facts[at] - smoothed[at])
    for number in range(len(drafting)):
        tier = drafting[number]
        tier.decodes += rate * (tiers[number].decoding - tier.decodes)
        tier.since += 1
        _learn(tier)
    for number in range(len(drafting)):
        tier = drafting[number]
        if tier.most > 0 and tiers[number].decoding > 0 and tier.since >= SETTLE_STEPS:
            _choose(coef, drafting, number, smoothed, cost, kept)
    for number in range(len(drafting)):
        tier = drafting[number]
        tier.step_tokens = tokens_per_step(acceptance(tier), kept, tier.length)


@compiled
def _choose(
    coef: npt.NDArray[np.float64],
    drafting: Any,
    number: int,
    facts: npt.NDArray[np.float64],
    cost: npt.NDArray[np.float64],
    kept: float,
) -> None:
    tier = drafting[number]
    others = np.zeros(3)
    for place in range(len(drafting)):
        other = drafting[place]
        if place == number:
            continue
        others[0] += other.decodes * tokens_per_step(acceptance(other), kept, other.length)
        others[1] += other.decodes * other.length
        if other.decodes > 0.0:
            others[2] = max(others[2], float(other.length))
    best = best_drafts(
        coef,
        facts,
        tier.decodes,
        acceptance(tier),
        kept,
        others,
        cost,
        tier.most,
        tier.length,
        MARGIN,
    )
    if best != tier.length:
        tier.length = best
        tier.since = 0
