"""Fits the cost of an engine's encoders to logged steps that encoded media.

What such a step takes beyond the step-time model is the encoders'. It reads no files and knows
nothing of their limits, which a log does not tell.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from trimtab.engine_bridge.encoder_spec import EncoderFile, EncoderSpec
from trimtab.engine_bridge.media import MEDIA_KINDS
from trimtab.engine_bridge.step_time import CoefArray
from trimtab.training.calibration.fit import parts_ms
from trimtab.training.calibration.table import FloatArray, StepTable

FEWEST_STEPS: Final = 20
"""With fewer steps of a kind nothing is said of it."""
_SAME_SIZE: Final = 0.1
"""Items whose sizes vary by less tell what a token costs, not what an item costs beside it."""
_SOFT_ERROR: Final = 0.05
_MS_PER_US: Final = 1e-3


def fit_encoder(table: StepTable, encoded: FloatArray, coef: CoefArray) -> EncoderFile | None:
    """An encoder section with `item_ms` and `us_per_token` of each kind that the steps show.

    Least squares of the errors relative to the step, with those beyond 5 % counting linearly. A
    part that grows with the square of an item is not told apart from the linear one.

    Args:
        table: Steps that encoded something, m of them.
        encoded: Items and tokens of each kind, shape (m, 2 x kinds).
        coef: The engine's step-time coefficients.

    Returns:
        None if no kind was encoded in `FEWEST_STEPS` steps.
    """
    free = _told(encoded)
    if not free.any():
        return None
    known = free.reshape(-1, 2).any(axis=1).repeat(2)
    # Steps with a kind that too few show would bend the others.
    rows = ~encoded[:, ~known].any(axis=1)
    some = table.take(np.flatnonzero(rows).astype(np.int64))
    rest_ms = some.iter_ms - parts_ms(coef, some).sum(axis=1)
    units = np.tile((1.0, _MS_PER_US), len(MEDIA_KINDS))
    work = (encoded[rows] * units)[:, free] / some.iter_ms[:, None]

    def residuals(x: FloatArray) -> FloatArray:
        errors: FloatArray = work @ x - rest_ms / some.iter_ms
        return errors

    start = np.full(int(free.sum()), 1.0)
    solution = least_squares(
        residuals, start, bounds=(0.0, np.inf), x_scale="jac", loss="soft_l1", f_scale=_SOFT_ERROR
    )
    costs = np.zeros(len(free))
    costs[free] = [float(f"{value:.4g}") for value in solution.x]
    kinds = tuple((once, us, 0.0) for once, us in costs.reshape(-1, 2).tolist())
    return EncoderSpec(kinds=kinds).as_file()


def _told(encoded: FloatArray) -> npt.NDArray[np.bool_]:
    """Which costs the steps tell: of a kind that enough of them show, by item only if sizes vary.

    Returns:
        bool, shape (2 x kinds,), in the order of the columns.
    """
    free = np.zeros(encoded.shape[1], np.bool_)
    for at in range(0, encoded.shape[1], 2):
        items, tokens = encoded[:, at], encoded[:, at + 1]
        shown = items > 0
        if np.count_nonzero(shown) < FEWEST_STEPS:
            continue
        sizes = tokens[shown] / items[shown]
        free[at] = np.ptp(sizes) > _SAME_SIZE * sizes.mean()
        free[at + 1] = True
    return free
