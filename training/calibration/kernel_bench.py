"""Step times out of microbenchmarks of single kernels, in the layout of inference-sim.

A folder with `gemm/<card>/data.csv` (`m`, `k`, `n`, `latency_us`) and `mha/prefill|decode/<card>/
<heads>-<kv heads>-<head dim>[-tp<N>].csv`, microseconds of one layer. Nothing is fitted here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from trimtab.engine_bridge.errors import TableError
from trimtab.training.calibration.draws import Steps, as_table
from trimtab.training.calibration.layer_profile import padded
from trimtab.training.calibration.models import ModelShape
from trimtab.training.calibration.table import FloatArray, StepTable

_US_PER_MS: Final = 1e3
_LAYER_US: Final = 12.0
"""Norms, rotary embedding, activation and gaps of one layer, which the tables do not have."""
_STEP_US: Final = 500.0
"""Sampler and preparation of a step, likewise."""
_GEMM: Final = ("m", "k", "n", "latency_us")


class KernelBench:
    """The tables of one card."""

    def __init__(self, folder: Path, shape: ModelShape, tp: int) -> None:
        """Read what one model on `tp` GPUs needs.

        Raises:
            TableError: a table is missing or lacks a column.
        """
        self._shape, self._tp = shape, tp
        gemm = _one(folder, "gemm/*/data.csv*")
        self._gemm = _read(gemm, _GEMM)
        heads = f"{shape.heads}-{shape.kv_heads}-{shape.head_dim}"
        self._prefill = _read(_one(folder, f"mha/prefill/*/{heads}.csv*"), ("seq_len",))
        self._decode = _read(
            _one(folder, f"mha/decode/*/{heads}-tp{tp}.csv*"), ("batch_size", "kv_len")
        )

    def steps(self, steps: Steps, *, max_num_seqs: int) -> StepTable:
        """The time of each step; attention of chunk and decodes is added."""
        shape, tp, layers = self._shape, self._tp, self._shape.layers
        tokens = padded(steps.decodes + steps.chunk, max_num_seqs)
        each = (
            (shape.hidden, shape.qkv_width // tp),
            (shape.heads * shape.head_dim // tp, shape.hidden),
            (shape.hidden, 2 * shape.mlp // tp),
            (shape.mlp // tp, shape.hidden),
        )
        linear = layers * (sum(self._matmul_us(tokens, k, n) for k, n in each) + _LAYER_US)
        sequences = steps.decodes + (steps.chunk > 0)
        linear = linear + self._matmul_us(sequences, shape.hidden, shape.vocab // tp) + _STEP_US
        return as_table(
            steps,
            linear_ms=linear / _US_PER_MS,
            prefill_ms=layers * self._prefill_us(steps) / _US_PER_MS,
            decode_ms=layers * self._decode_us(steps) / _US_PER_MS,
            source="GEMM and attention kernels",
        )

    def _matmul_us(self, m: FloatArray, k: int, n: int) -> FloatArray:
        """Of the measured shapes the nearest in size, scaled by the size."""
        shapes = self._gemm[["k", "n"]].drop_duplicates().to_numpy(np.float64)
        distance = np.abs(np.log(shapes[:, 0] / k)) + np.abs(np.log(shapes[:, 1] / n))
        near = shapes[int(np.argmin(distance))]
        rows = self._gemm[(self._gemm.k == near[0]) & (self._gemm.n == near[1])].sort_values("m")
        sizes, times = rows.m.to_numpy(np.float64), rows.latency_us.to_numpy(np.float64)
        scale = k * n / (near[0] * near[1])
        us: FloatArray = np.interp(m, sizes, times) * scale
        return us

    def _prefill_us(self, steps: Steps) -> FloatArray:
        """By query-key pairs: a chunk after a prefix is as long as a prompt of as many pairs."""
        table = self._prefill.sort_values("seq_len")
        pairs = 0.5 * table.seq_len.to_numpy(np.float64) ** 2
        times = table.latency_us.to_numpy(np.float64) / self._tp
        own = steps.chunk * (steps.prefix + 0.5 * steps.chunk)
        inside = np.interp(own, pairs, times)
        below = times[0] * np.maximum(own / pairs[0], 0.1)
        us = np.where(own < pairs[0], below, inside)
        return np.where(steps.chunk > 0, us, 0.0)

    def _decode_us(self, steps: Steps) -> FloatArray:
        """By context tokens read, with the smallest time of the table as the launch."""
        table = self._decode.groupby(self._decode.batch_size * self._decode.kv_len)
        times = table.latency_us.median()
        size, us = times.index.to_numpy(np.float64), times.to_numpy(np.float64)
        us = np.maximum.accumulate(np.minimum(us, np.minimum.accumulate(us[::-1])[::-1]))
        read = np.interp(steps.decodes * steps.context, size, us)
        return np.where(steps.decodes > 0, read, 0.0)


def is_kernel_bench(folder: Path) -> bool:
    """Whether a folder has this layout."""
    return any(folder.glob("gemm/*/data.csv*"))


def _one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise TableError(str(folder), value="no table", bound=f"a file {pattern}")
    return found[0]


def _read(path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise TableError(str(path), value=str(error).split("\n")[0], bound="CSV") from None
    for column in (*columns, "latency_us"):
        if column not in table.columns:
            raise TableError(str(path), key=column, value="missing column", bound="in the header")
        if not np.isfinite(pd.to_numeric(table[column], errors="coerce")).all():
            raise TableError(str(path), key=column, value="not a number", bound="numbers only")
    return table
