"""Fits the step-time model to steps that are composed of kernel tables.

It chooses where the fit starts and adds what kernel tables do not have; the least squares are
`fit`'s.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from trimtab.engine_bridge.step_time import COEFFICIENTS, CoefArray
from trimtab.training.calibration.cards import Card, add_collectives, scaled_engine
from trimtab.training.calibration.draws import Limits, draw_steps
from trimtab.training.calibration.fit import error_report, fit_coefficients
from trimtab.training.calibration.layer_profile import LayerProfile

_INDEX: Final = {name: place for place, (name, _, _) in enumerate(COEFFICIENTS)}
_ROWS: Final = 3000
_TEST_ROWS: Final = 1000


def fit_profile(
    profile: LayerProfile,
    card: Card,
    limits: Limits,
    *,
    tp: int,
    expert_parallel: bool = False,
    seed: int = 0,
) -> tuple[CoefArray, dict[str, Any]]:
    """Coefficients for one profile, for batches within an engine's limits.

    Args:
        profile: kernels at this tensor-parallel size.
        card: the GPU, for what the kernels do not have (collectives).
        limits: what a batch can hold; with several engines of all together.
        tp: tensor-parallel size.
        expert_parallel: experts are spread over the engines.
        seed: seed of the drawn steps.

    Returns:
        Coefficients, and `fit.error_report` over steps that were not fitted.
    """
    spread = limits.engines if expert_parallel else 1

    def draw(seed: int, rows: int) -> Any:
        return profile.steps(
            draw_steps(limits, np.random.default_rng(seed), rows),
            max_num_seqs=limits.max_num_seqs // limits.engines,
            engines=limits.engines,
            expert_parallel=expert_parallel,
        )

    base = scaled_engine(profile.shape, card, tp * spread, mixed=True)
    base[[_INDEX["allreduce_ms"], _INDEX["allreduce_us_per_token"]]] = 0.0
    base[_INDEX["experts_per_token"]] *= 1.0 / limits.engines if not expert_parallel else 1.0
    coef = fit_coefficients(draw(seed, _ROWS), base)
    errors = error_report(coef, draw(seed + 1, _TEST_ROWS))
    if tp > 1:
        add_collectives(coef, profile.shape, card, tp)
    elif limits.engines > 1 and expert_parallel:
        add_collectives(coef, profile.shape, card, limits.engines)
    return coef, errors
