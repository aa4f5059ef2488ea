"""Rule 9's arithmetic: what drafts give, what they cost, and which length pays best.

Estimates from the step-time model and a measured acceptance; who drafts and what, is the engine's
business, and when a length is chosen anew, that of `draft_lengths`. With a per-token acceptance a
that holds at every place, drafts of length k give (1 - a^(k+1)) / (1 - a) tokens a step on average
(Leviathan et al., arXiv 2211.17192).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.pricing import OUTPUT_PRICE
from trimtab.engine_bridge.step_time import step_ms

PREFILL_WORTH: Final = 1.0 / OUTPUT_PRICE
"""Worth of a prefill token in tokens of an answer, as their prices are."""


@compiled
def tokens_per_step(acceptance: float, kept: float, drafts: int) -> float:
    """Tokens that a decode gives on average when it verifies that many drafts.

    Args:
        acceptance: Of the first draft; of each later one given that the one before it was right.
        kept: Part of the acceptance that is left at the next place, in (0, 1].
        drafts: Draft tokens, at least 0.
    """
    tokens, reached, now = 1.0, 1.0, acceptance
    for _ in range(drafts):
        reached *= now
        tokens += reached
        now *= kept
    return tokens


@compiled
def drafting_ms(draft_us: float, pass_ms: float, drafts: float, longest: float) -> float:
    """What making the drafts of a step costs: a forward pass a place, and each token."""
    return pass_ms * longest + drafts * draft_us * 1e-3


@compiled
def verified_step_ms(
    coef: npt.NDArray[np.float64], facts: npt.NDArray[np.float64], drafts: float
) -> float:
    """A step that verifies `drafts` tokens in all beside what it carries anyway, ms.

    A draft token is one more token of the linear part; a request's KV is read once for all of its
    tokens. What it costs to make the drafts is `drafting_ms`.

    Args:
        coef: The step-time model's coefficients.
        facts: Decodes, the KV tokens that they read, prefill chunks, their tokens, their query-key
            pairs, and the milliseconds of what encoders do beside, shape (6,).
        drafts: Draft tokens of all requests.
    """
    decodes, kv_tokens, chunks, chunk_tokens, pairs, encode_ms = facts
    tokens = decodes + drafts + chunk_tokens
    ms = step_ms(coef, tokens, decodes + chunks, chunks, chunk_tokens, pairs, decodes, kv_tokens)
    return ms + encode_ms


@compiled
def best_drafts(
    coef: npt.NDArray[np.float64],
    facts: npt.NDArray[np.float64],
    decodes: float,
    acceptance: float,
    kept: float,
    others: npt.NDArray[np.float64],
    cost: npt.NDArray[np.float64],
    most: int,
    now: int,
    margin: float,
) -> int:
    """The draft length of a tier that gives the whole batch most worth a second.

    Tokens of answers count 1, the prefill that a longer step would delay by its share of that. What
    another length would win must be more than `margin` of what is had now, so that noise in the
    acceptance moves nothing.

    Args:
        coef: The step-time model's coefficients.
        facts: The step without drafts, as for `verified_step_ms`.
        decodes: Requests of the tier that decode.
        acceptance: Measured share of its first draft tokens that are accepted.
        kept: Part of the acceptance that is left at the next place.
        others: Of the other tiers' decodes the tokens that they give in a step, their draft tokens,
            and the longest of their lengths, shape (3,).
        cost: Microseconds of one draft token, milliseconds of one pass of the draft model, and the
            worth of a prefill token in tokens of an answer, shape (3,).
        most: Longest length allowed.
        now: Length that is used now, at most `most`.
        margin: Share of today's rate, at least 0.
    """
    best, best_rate, now_rate = now, -1.0, 0.0
    for length in range(most + 1):
        drafts = others[1] + decodes * length
        ms = verified_step_ms(coef, facts, drafts)
        ms += drafting_ms(cost[0], cost[1], drafts, max(others[2], float(length)))
        worth = others[0] + decodes * tokens_per_step(acceptance, kept, length)
        rate = (worth + cost[2] * facts[3]) / ms
        if rate > best_rate:
            best, best_rate = length, rate
        if length == now:
            now_rate = rate
    if best_rate > now_rate * (1.0 + margin):
        return best
    return now
