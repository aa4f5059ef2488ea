"""Fits an engine's level to requests that ran alone: their first token and their pace.

Such requests tell the time of one weight pass, of a prompt token and of a context token; the shape
over the batch stays the starting engine's. Loaded requests must not be given to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from trimtab.engine_bridge.errors import TableError
from trimtab.engine_bridge.step_time import COEFFICIENTS, CoefArray, step_ms
from trimtab.training.calibration.table import FloatArray

_INDEX: Final = {name: place for place, (name, _, _) in enumerate(COEFFICIENTS)}
GROUPS: Final = (
    ("weights_ms", "tile_ms", "experts_ms"),
    ("weights_us_per_token", "tile_us_per_token", "compute_ms", "compute_us_per_token"),
    ("prefill_us_per_token", "pair_ns"),
    ("kv_ns_per_token", "mixed_kv_ns_per_token"),
)
"""Coefficients that are moved together."""
_DOUBT: Final = (0.5, 0.5, 0.1, 0.1)
"""How far (standard deviation of the logarithm) the starting engine may be wrong in each group."""
_NOISE: Final = 0.01
_HOST_S: Final = 0.002
_FEWEST: Final = 3


@dataclass(frozen=True, kw_only=True)
class Isolated:
    """Requests that had the engine to themselves; arrays of shape (n,)."""

    prompt_tokens: FloatArray
    """Tokens to compute, without those that the prefix cache had."""
    cached_tokens: FloatArray
    output_tokens: FloatArray
    prefill_s: FloatArray
    """From the start of the first step to the first token, seconds; NaN where not known."""
    tpot_s: FloatArray
    """Mean time of the later tokens, seconds; NaN with one token."""

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.prompt_tokens)


def fit_isolated(
    base: CoefArray, requests: Isolated, *, max_num_batched_tokens: int
) -> tuple[CoefArray, float]:
    """Move the starting engine to the level of the isolated requests.

    Four factors are fitted: of the weight pass, of a token's multiplications, of prefill attention
    and of reading KV; each is held near 1 as far as the data leave it open. A host time for each
    prompt (tokenising, queueing, sending) is fitted beside them. Errors count in relation to the
    measured time, those beyond 3 % linearly, so that a warm-up request does no harm.

    Args:
        base: coefficients to start from.
        requests: at least 3 isolated requests.
        max_num_batched_tokens: budget of a step: longer prompts take several.

    Returns:
        New coefficients, and the host time of a prompt, seconds.

    Raises:
        TableError: fewer than 3 requests, or none with a pace.
    """
    if len(requests) < _FEWEST or not np.isfinite(requests.tpot_s).any():
        raise TableError(
            "isolated requests",
            value=f"{len(requests)} requests",
            bound=f"at least {_FEWEST}, some with two or more output tokens",
            remedy="measure the engine with one request at a time",
        )

    def residuals(x: FloatArray) -> FloatArray:
        coef = moved(base, x)
        prefill = np.array(
            [
                prompt_ms(coef, tokens, cached, max_num_batched_tokens)
                for tokens, cached in zip(
                    requests.prompt_tokens, requests.cached_tokens, strict=True
                )
            ]
        )
        pace = np.array(
            [
                decode_ms(coef, context)
                for context in requests.prompt_tokens
                + requests.cached_tokens
                + 0.5 * requests.output_tokens
            ]
        )
        errors = np.concatenate(
            [
                (prefill + x[-1] * 1e3) / (requests.prefill_s * 1e3) - 1.0,
                pace / (requests.tpot_s * 1e3) - 1.0,
            ]
        )
        errors = errors[np.isfinite(errors)] / _NOISE
        return np.concatenate([errors, x[:-1] / np.array(_DOUBT), [x[-1] / _HOST_S]])

    start = np.zeros(len(GROUPS) + 1)
    solution = least_squares(residuals, start, loss="soft_l1", f_scale=3.0, max_nfev=60)
    host_s = float(max(solution.x[-1], 0.0))
    return moved(base, solution.x), host_s


def prompt_ms(coef: CoefArray, tokens: float, cached: float, budget: int) -> float:
    """The steps of one prompt alone, in chunks of the budget, milliseconds."""
    whole, done = 0.0, 0.0
    while done < tokens:
        chunk = min(tokens - done, float(budget))
        pairs = chunk * (cached + done + 0.5 * chunk)
        whole += step_ms(coef, chunk, 1.0, 1.0, chunk, pairs, 0.0, 0.0)
        done += chunk
    return whole


def decode_ms(coef: CoefArray, context: float) -> float:
    """A step of one decoding request, milliseconds."""
    return float(step_ms(coef, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, float(context)))


def moved(base: CoefArray, x: FloatArray) -> CoefArray:
    """The coefficients with each group times the exponential of its number in `x`.

    Args:
        base: coefficients.
        x: logarithms of the factors of a weight pass, of a token's multiplications, of prefill
            attention and of reading KV; what follows is ignored.
    """
    coef = base.copy()
    factors = np.exp(np.clip(x, -3.0, 3.0))
    experts = base[_INDEX["experts_ms"]]
    if experts > 0 and factors[0] > 1.0:
        # What a mixture takes longer than its bytes is launches and routing, whatever the batch.
        coef[_INDEX["allreduce_ms"]] += (factors[0] - 1.0) * base[_INDEX["weights_ms"]]
        factors[0] = 1.0
    for names, factor in zip(GROUPS, factors, strict=False):
        coef[[_INDEX[name] for name in names]] *= factor
    return coef
