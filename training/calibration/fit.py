"""Fits the step-time model's coefficients to a table of steps, and measures its error.

It reads and writes no files. The same model that the replay runs is fitted, part by part where
the table splits the step, on the whole step where it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import njit
from scipy.optimize import least_squares

from trimtab.engine_bridge.engine_file import EngineFile
from trimtab.engine_bridge.step_time import (
    COEF_LEN,
    COEFFICIENTS,
    CoefArray,
    decode_attention_ms,
    linear_ms,
    mixed_attention_ms,
    prefill_attention_ms,
)
from trimtab.training.calibration.table import REGIONS, FloatArray, StepTable

_NAMES: Final = tuple(name for name, _, _ in COEFFICIENTS)
_UNIT_SIZE: Final = {"ms": 1.0, "us": 10.0, "ns": 1.0, "to": 1.0, "fr": 1.0}
_TYPICAL: Final = np.array([_UNIT_SIZE[unit[:2]] for _, unit, _ in COEFFICIENTS])
_ALLREDUCE: Final = (_NAMES.index("allreduce_ms"), _NAMES.index("allreduce_us_per_token"))
_TILE_FROM: Final = _NAMES.index("tile_from_tokens")
_PREFILL: Final = slice(_NAMES.index("prefill_launch_ms"), _NAMES.index("pair_ns") + 1)
_DECODE: Final = slice(
    _NAMES.index("decode_launch_ms"), _NAMES.index("decode_batch_us_per_request") + 1
)
_MIXED: Final = slice(_NAMES.index("mixed_us_per_request"), _NAMES.index("mixed_grid_ns") + 1)
_EXPERTS: Final = _NAMES.index("experts_ms")
_EXPERTS_PER_TOKEN: Final = _NAMES.index("experts_per_token")
_TILE_ROWS: Final = (0.0, 64.0, 128.0, 256.0, 512.0)
_SOFT_ERROR: Final = 0.02
_TRIAL_ROWS: Final = 600
_FEWEST_ROWS: Final = 40
_DIGITS: Final = 5


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Coefficients, and how well they do on the fitted rows and on the others."""

    coefficients: tuple[float, ...]
    fitted: dict[str, Any]
    """`error_report` over the rows that were fitted."""
    held_out: dict[str, Any]
    """`error_report` over the rows that were not."""


def parts_ms(coef: CoefArray, table: StepTable) -> FloatArray:
    """The model's linear, prefill-attention and decode-attention times, ms, shape (n, 3)."""
    parts: FloatArray = _parts(
        coef,
        table.tokens,
        table.sequences,
        table.chunks,
        table.chunk_tokens,
        table.pairs,
        table.requests,
        table.kv_tokens,
    )
    return parts


def error_report(coef: CoefArray, table: StepTable) -> dict[str, Any]:
    """Relative errors of whole steps, |model / measured - 1|, as fractions.

    Returns:
        `{"rows", "median", "p95", "max", "by_kind": {"decode": {...}, ...}}`; None without rows.
    """
    errors = np.abs(parts_ms(coef, table).sum(axis=1) / table.iter_ms - 1.0)
    by_kind = {name: _quantiles(errors[table.region == i]) for i, name in enumerate(REGIONS)}
    return {**_quantiles(errors), "by_kind": by_kind}


def fit_coefficients(table: StepTable, base: CoefArray) -> CoefArray:
    """Fit every coefficient that the table says something about; keep the others.

    Least squares of the errors relative to the whole step, with errors beyond 2 % counting
    linearly (soft L1), so that a few odd rows do not bend the fit. Several starts made from `base`
    are tried on up to 600 rows, the best is refined on all. A table of fewer than 40 rows cannot
    tell the coefficients apart: it only moves `base` to its level.

    Args:
        table: the steps to fit.
        base: coefficients to start from, all at least 0, shape (COEF_LEN,).

    Returns:
        New coefficients, rounded to 5 significant digits, shape (COEF_LEN,).
    """
    if len(table) < _FEWEST_ROWS:
        return _rounded(base * _level(table, base))
    few = table.take(np.linspace(0, len(table) - 1, min(len(table), _TRIAL_ROWS)).astype(np.int64))
    trials = [_solve(few, start, evaluations=40) for start in _starts(table, base)]
    best = min(trials, key=lambda trial: trial[1])[0]
    return _rounded(_solve(table, best, evaluations=200)[0])


def _solve(table: StepTable, start: CoefArray, *, evaluations: int) -> tuple[CoefArray, float]:
    """The least-squares solution nearest to `start`, and its cost."""
    free = _free(table, start)
    scale = np.maximum(start, 0.1 * _TYPICAL)

    def residuals(some: FloatArray) -> FloatArray:
        coef = start.copy()
        coef[free] = some
        return _residuals(coef, table)

    solution = least_squares(
        residuals,
        np.maximum(start[free], 1e-6 * scale[free]),
        bounds=(0.0, np.inf),
        x_scale=scale[free],
        loss="soft_l1",
        f_scale=_SOFT_ERROR,
        ftol=1e-7,
        max_nfev=evaluations,
    )
    coef = start.copy()
    coef[free] = solution.x
    return coef, float(solution.cost)


def _residuals(coef: CoefArray, table: StepTable) -> FloatArray:
    """Errors of whole steps and of every part that the table knows, relative to the step."""
    parts = parts_ms(coef, table)
    latency_ms, us_per_token = coef[list(_ALLREDUCE)]
    allreduce_ms = latency_ms + us_per_token * table.tokens * 1e-3
    errors = (
        parts.sum(axis=1) - table.iter_ms,
        parts[:, 0] - table.nonattn_ms,
        parts[:, 1] - table.prefill_attn_ms,
        parts[:, 2] - table.decode_attn_ms,
        allreduce_ms - table.allreduce_ms,
    )
    relative = np.concatenate([error / table.iter_ms for error in errors])
    return np.where(np.isnan(relative), 0.0, relative)


def fitted_file(base: EngineFile, fit: Fit, *, name: str, sources: tuple[str, ...]) -> EngineFile:
    """`base` with the fit's coefficients, its errors and its sources in `fidelity`."""
    return base.model_copy(
        update={
            "name": name or base.name,
            "coefficients": dict(zip(_NAMES, fit.coefficients, strict=True)),
            "fidelity": {
                "sources": list(sources),
                "relative_error": {
                    "fitted": _summary(fit.fitted),
                    "held_out": _summary(fit.held_out),
                },
            },
        }
    )


def fit_and_test(
    table: StepTable, base: CoefArray, *, held_out_fraction: float, rng: np.random.Generator
) -> Fit:
    """Fit a random part of the table and measure the error on both parts."""
    order = rng.permutation(len(table)).astype(np.int64)
    cut = max(1, round(len(table) * (1.0 - held_out_fraction)))
    fitted, held_out = table.take(order[:cut]), table.take(order[cut:])
    coef = fit_coefficients(fitted, base)
    return Fit(
        coefficients=tuple(float(value) for value in coef),
        fitted=error_report(coef, fitted),
        held_out=error_report(coef, held_out),
    )


def _summary(report: dict[str, Any]) -> dict[str, Any]:
    """The report as numbers of 4 decimals, kinds without rows left out."""
    kinds = {"all": report, **report["by_kind"]}
    return {
        kind: {key: round(value, 4) for key, value in errors.items() if key != "by_kind"}
        for kind, errors in kinds.items()
        if errors["rows"]
    }


def _free(table: StepTable, start: CoefArray) -> npt.NDArray[np.bool_]:
    free = np.ones(COEF_LEN, np.bool_)
    free[_TILE_FROM] = False
    free[_EXPERTS_PER_TOKEN] = False
    # What the start does not have (experts, a dearer mixed kernel) the fit does not invent.
    free[_EXPERTS] = start[_EXPERTS] > 0
    if not np.any(table.chunks > 0):
        free[_PREFILL] = False
    if not np.any(table.requests > 0):
        free[_DECODE] = False
    free[_MIXED] = start[_MIXED] > 0
    if np.count_nonzero((table.chunks > 0) & (table.requests > 0)) < _FEWEST_ROWS:
        free[_MIXED] = False
    # Without its own column the all-reduce cannot be told from the other work of a token.
    if not np.any(table.allreduce_ms > 0):
        free[list(_ALLREDUCE)] = False
    return free


def _starts(table: StepTable, base: CoefArray) -> list[CoefArray]:
    """Places to start from: `base` at the table's level, with the tile regime at several places."""
    level = base * _level(table, base)
    starts = []
    for tile_rows in sorted({float(base[_TILE_FROM]), *_TILE_ROWS}):
        start = level.copy()
        start[_TILE_FROM] = tile_rows
        starts.append(start)
    return starts


def _level(table: StepTable, base: CoefArray) -> FloatArray:
    """Factor a coefficient that brings each part of `base` to the table's level."""
    parts = parts_ms(base, table)
    whole = float(np.median(table.iter_ms / np.maximum(parts.sum(axis=1), 1e-9)))
    level = np.full(COEF_LEN, whole)
    measured = (table.nonattn_ms, table.prefill_attn_ms, table.decode_attn_ms)
    spans = (slice(0, _PREFILL.start), _PREFILL, slice(_DECODE.start, _MIXED.stop))
    for part, actual in enumerate(measured):
        rows = (actual > 0) & (parts[:, part] > 0)
        if rows.any():
            ratio = float(np.median(actual[rows] / parts[rows, part]))
            level[spans[part]] = ratio
    level[_EXPERTS] = level[0]
    level[[_TILE_FROM, _EXPERTS_PER_TOKEN]] = 1.0
    return level


def _rounded(coef: CoefArray) -> CoefArray:
    tiny = coef < 1e-4 * _TYPICAL
    rounded = [0.0 if t else float(f"{c:.{_DIGITS}g}") for c, t in zip(coef, tiny, strict=True)]
    return np.array(rounded, np.float64)


def _quantiles(errors: FloatArray) -> dict[str, Any]:
    if not len(errors):
        return {"rows": 0, "median": None, "p95": None, "max": None}
    median, p95, largest = np.quantile(errors, (0.5, 0.95, 1.0))
    return {
        "rows": len(errors),
        "median": float(median),
        "p95": float(p95),
        "max": float(largest),
    }


@njit(cache=True)
def _parts(
    coef: CoefArray,
    tokens: FloatArray,
    sequences: FloatArray,
    chunks: FloatArray,
    chunk_tokens: FloatArray,
    pairs: FloatArray,
    requests: FloatArray,
    kv_tokens: FloatArray,
) -> FloatArray:
    parts = np.empty((len(tokens), 3))
    for i in range(len(tokens)):
        parts[i, 0] = linear_ms(coef, tokens[i], sequences[i])
        parts[i, 1] = prefill_attention_ms(coef, chunks[i], chunk_tokens[i], pairs[i])
        parts[i, 2] = decode_attention_ms(coef, requests[i], kv_tokens[i])
        parts[i, 2] += mixed_attention_ms(coef, chunk_tokens[i], requests[i], kv_tokens[i])
    return parts
