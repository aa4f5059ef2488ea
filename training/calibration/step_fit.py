"""Fits an engine to the steps of a log, as many coefficients as the log can tell apart.

Logs of a running engine are narrow: context and batch grow together, chunks are rare. A full fit of
such steps holds where they were measured and nowhere else; here the starting engine's shape stays.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from scipy.optimize import least_squares

from trimtab.engine_bridge.step_time import COEFFICIENTS, CoefArray
from trimtab.training.calibration.fit import parts_ms
from trimtab.training.calibration.isolated import GROUPS, moved
from trimtab.training.calibration.table import FloatArray, StepTable

_SEQUENCE: Final = [name for name, _, _ in COEFFICIENTS].index("sequence_us")
_DOUBT: Final = (0.5, 0.5, 0.2, 0.1)
"""How far (standard deviation of the logarithm) the starting engine may be wrong in each group."""
_SEQUENCE_US: Final = 20.0
"""Likely size of the host's time for a request of a step, microseconds."""
_NOISE: Final = 0.03
_MOST_ROWS: Final = 20_000


def fit_step_log(table: StepTable, base: CoefArray) -> CoefArray:
    """Move the starting engine to the level of the steps.

    Four factors (weight pass, a token's multiplications, prefill attention, KV reads), held near 1
    as far as the steps leave them open, and a time for each request of a step. Errors count in
    relation to the step, those beyond 10 % linearly.

    Args:
        table: at least one step.
        base: coefficients to start from.
    """
    rows = np.linspace(0, len(table) - 1, min(len(table), _MOST_ROWS)).astype(np.int64)
    few = table.take(rows)
    # Many rows of one kind must not drown what is known of the card.
    weight = 1.0 / (_NOISE * max(1.0, np.sqrt(len(few) / 100.0)))

    def residuals(x: FloatArray) -> FloatArray:
        told = parts_ms(_with(base, x), few).sum(axis=1)
        doubt = x / np.array([*_DOUBT, _SEQUENCE_US])
        return np.concatenate([weight * (told / few.iter_ms - 1.0), doubt])

    start = np.zeros(len(GROUPS) + 1)
    solution = least_squares(residuals, start, loss="soft_l1", f_scale=3.0, max_nfev=100)
    return _with(base, solution.x)


def _with(base: CoefArray, x: FloatArray) -> CoefArray:
    coef = moved(base, x[:-1])
    coef[_SEQUENCE] += max(float(x[-1]), 0.0)
    return coef
