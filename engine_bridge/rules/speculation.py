"""Rule 9: how many draft tokens a tier's decodes verify, and when drafting is a loss.

Estimates from the step-time model and a measured acceptance; who drafts and what, is the engine's
business. With a per-token acceptance a, drafts of length k give (1 - a^(k+1)) / (1 - a) tokens a
step on average (Leviathan et al., arXiv 2211.17192).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.step_time import step_ms


@compiled
def tokens_per_step(acceptance: float, drafts: int) -> float:
    """Tokens that a decode gives on average when it verifies that many drafts."""
    if acceptance >= 1.0:
        return drafts + 1.0
    return float((1.0 - acceptance ** (drafts + 1)) / (1.0 - acceptance))


@compiled
def verified_step_ms(
    coef: npt.NDArray[np.float64],
    facts: npt.NDArray[np.float64],
    drafts: float,
    draft_us: float,
) -> float:
    """A step that verifies `drafts` tokens in all beside what it carries anyway, ms.

    A draft token is one more token of the linear part; a request's KV is read once for all of its
    tokens. Each also costs `draft_us` to be drafted.

    Args:
        coef: The step-time model's coefficients.
        facts: Decodes, the KV tokens that they read, prefill chunks, their tokens and their
            query-key pairs, shape (5,).
        drafts: Draft tokens of all requests.
        draft_us: Microseconds that drafting one token costs; 0 for a look-up of n-grams.
    """
    decodes, kv_tokens, chunks, chunk_tokens, pairs = facts
    tokens = decodes + drafts + chunk_tokens
    ms = step_ms(coef, tokens, decodes + chunks, chunks, chunk_tokens, pairs, decodes, kv_tokens)
    return ms + drafts * draft_us * 1e-3


@compiled
def best_drafts(
    coef: npt.NDArray[np.float64],
    facts: npt.NDArray[np.float64],
    decodes: float,
    acceptance: float,
    others_tokens: float,
    others_drafts: float,
    draft_us: float,
    most: int,
    now: int,
    margin: float,
) -> int:
    """The draft length of a tier that gives the whole batch most tokens a second.

    What another length would win must be more than `margin` of what is had now, so that noise in
    the acceptance moves nothing.

    Args:
        coef: The step-time model's coefficients.
        facts: The step without drafts, as for `verified_step_ms`.
        decodes: Requests of the tier that decode.
        acceptance: Measured share of its draft tokens that are accepted, each given that the one
            before it was.
        others_tokens: Tokens that the other tiers' decodes give in a step.
        others_drafts: Draft tokens that they verify.
        draft_us: Microseconds that drafting one token costs.
        most: Longest length allowed.
        now: Length that is used now, at most `most`.
        margin: Share of today's rate, at least 0.
    """
    best, best_rate, now_rate = now, -1.0, 0.0
    for length in range(most + 1):
        ms = verified_step_ms(coef, facts, others_drafts + decodes * length, draft_us)
        rate = (others_tokens + decodes * tokens_per_step(acceptance, length)) / ms
        if rate > best_rate:
            best, best_rate = length, rate
        if length == now:
            now_rate = rate
    if best_rate > now_rate * (1.0 + margin):
        return best
    return now
