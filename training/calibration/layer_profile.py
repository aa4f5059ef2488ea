"""Step times out of a profile of one layer's kernels, in the layout of LLMServingSim.

A folder `<card>/<model>/<variant>/tp<N>` holds CSV tables in microseconds: `dense` (by tokens),
`per_sequence`, `attention`, for mixtures `moe`, and where measured `skew`. Nothing is fitted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import yaml
from scipy.interpolate import RegularGridInterpolator

from trimtab.engine_bridge.errors import TableError
from trimtab.training.calibration.draws import Steps, as_table
from trimtab.training.calibration.models import ModelShape
from trimtab.training.calibration.table import FloatArray, StepTable

_ONCE: Final = ("embedding", "final_layernorm")
_TWICE: Final = ("layernorm",)
_AXES: Final = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_US_PER_MS: Final = 1e3
_GAP_US: Final = 0.5
"""From the end of one kernel to the start of the next inside a CUDA graph, microseconds; less than
the bare gap, because compiling fuses small kernels that a profile in eager mode has apart."""
_STEP_US: Final = 150.0
"""Once a step: inputs, slot mapping and block tables put in place, sampled tokens copied. With the
gaps 0.3 ms for 32 layers: a third of the 0.9 to 1.15 ms that engines without asynchronous
scheduling are above their kernels (docs/step-times.md); the rest is CPU work, which it hides."""
_UNPROFILED_KERNELS: Final = 2
"""Kernels a layer that the tables do not have: writing the KV cache, the attention's combine."""
_LARGEST_GRAPH: Final = 512
_TYPICAL_CONTEXT: Final = (300.0, 3000.0)
_TYPICAL_RATIO: Final = (0.2, 0.8)
"""Part of the requests that are the long ones: the spread of real lengths is like two groups of
comparable size whose lengths differ by four, not like one long request among short ones."""


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One model's kernels on one card at one tensor-parallel size."""

    folder: Path
    hardware: str
    gpu: str
    model: str
    shape: ModelShape
    dense: pd.DataFrame
    per_sequence: pd.DataFrame
    attention: pd.DataFrame
    moe: pd.DataFrame | None
    skew: pd.DataFrame | None

    def steps(
        self, steps: Steps, *, max_num_seqs: int, engines: int = 1, expert_parallel: bool = False
    ) -> StepTable:
        """The time of each step: the layers, their gaps, the head and the sampler.

        Decode batches and small mixed ones are padded to the size of the CUDA graph that runs
        them. With several engines in lock step their decodes are split evenly, the chunk is one
        engine's, and the experts see the tokens of all.
        """
        layers = self.shape.layers
        decodes = np.ceil(steps.decodes / engines)
        alone = padded(decodes + steps.chunk, max_num_seqs)
        linear = self._linear_us(alone, decodes + (steps.chunk > 0))
        if self.moe is not None:
            together = alone * engines if engines > 1 else alone
            together = np.where(steps.chunk > 0, decodes * (engines - 1) + alone, together)
            share = engines if expert_parallel else 1
            linear = linear + layers * self._experts_us(together, share)
        prefill, decode = self._attention_us(
            Steps(decodes=decodes, context=steps.context, chunk=steps.chunk, prefix=steps.prefix)
        )
        return as_table(
            steps,
            linear_ms=linear / _US_PER_MS,
            prefill_ms=layers * prefill / _US_PER_MS,
            decode_ms=layers * decode / _US_PER_MS,
            source=f"kernels of {self.model} on {self.gpu}",
        )

    def _linear_us(self, tokens: FloatArray, sequences: FloatArray) -> FloatArray:
        table = self.dense
        layers = self.shape.layers
        times = np.array([2.0 if name in _TWICE else 1.0 for name in table.columns])
        times = np.where([name in _ONCE for name in table.columns], times, times * layers)
        kernels = times.sum() + layers * (1 + _UNPROFILED_KERNELS)
        whole = table.to_numpy(np.float64) @ times
        per_token = _line(table.index.to_numpy(np.float64), whole, tokens)
        heads = self.per_sequence
        head = heads.to_numpy(np.float64).sum(axis=1)
        per_sequence = _line(heads.index.to_numpy(np.float64), head, sequences)
        us: FloatArray = per_token + per_sequence + kernels * _GAP_US + _STEP_US
        return us

    def _experts_us(self, tokens: FloatArray, share: int) -> FloatArray:
        """One layer's experts on one GPU that holds one part in `share` of them."""
        assert self.moe is not None
        local = max(1.0, self.shape.experts / share)
        chance = self.shape.active_experts / self.shape.experts
        active = np.clip(local * (1.0 - (1.0 - chance) ** tokens), 1.0, None)
        # A local expert gets as many tokens as it would with all experts here: the work is split.
        table = self.moe.pivot(index="tokens", columns="activated_experts", values="time_us")
        grid = _filled(table)
        sizes, counts = np.log2(table.index.to_numpy(float)), np.log2(table.columns.to_numpy(float))
        inside = RegularGridInterpolator((sizes, counts), np.log(grid), bounds_error=False)
        held = np.clip(np.log2(np.maximum(tokens / share, 1.0)), sizes[0], sizes[-1])
        at = np.stack([held, np.clip(np.log2(active), counts[0], counts[-1])], axis=1)
        us: FloatArray = np.exp(inside(at))
        return us

    def _attention_us(self, steps: Steps) -> tuple[FloatArray, FloatArray]:
        """Attention of the chunk, and what the decodes add to it, one layer, microseconds."""
        table = self.attention
        alone = table[(table.prefill_chunk == 0) & (table.n_decode > 0)]
        chunks = table[(table.n_decode == 0) & (table.prefill_chunk > 0)]
        decode = _grid(alone, _AXES[2:])(np.stack([np.maximum(steps.decodes, 1), steps.context], 1))
        prefill = _grid(chunks, _AXES[:2])(np.stack([steps.chunk, steps.prefix], axis=1))
        both = table[(table.prefill_chunk > 0) & (table.n_decode > 0) & (table.kv_decode > 0)]
        mixed = (steps.chunk > 0) & (steps.decodes > 0)
        beside = decode
        if len(both):
            axes, values = _complete_grid(both)
            inside = RegularGridInterpolator(axes, values, bounds_error=False, fill_value=None)
            at = np.stack([steps.chunk, steps.prefix, steps.decodes, steps.context], axis=1)
            at = np.maximum(at, [axis[0] for axis in axes])
            beside = np.maximum(inside(at) - prefill, decode)
        skewed = np.where(mixed, self._skew(steps, "mixed"), self._skew(steps, "pure"))
        decode = np.where(mixed, beside, decode) * skewed
        return (
            np.where(steps.chunk > 0, prefill, 0.0),
            np.where(steps.decodes > 0, decode, 0.0),
        )

    def _skew(self, steps: Steps, regime: str) -> FloatArray:
        """How much longer decodes of unequal contexts take than those of their mean, a factor."""
        if self.skew is None:
            return np.ones(len(steps))
        low, high = _TYPICAL_CONTEXT
        rows = self.skew[(self.skew.regime == regime) & self.skew.kv_mean.between(low, high)]
        rows = rows[rows.ratio.between(*_TYPICAL_RATIO)]
        ratio = (rows.t_skew_us / rows.t_mean_us).groupby(rows.n).median()
        if not len(ratio):
            return np.ones(len(steps))
        sizes = np.log2(ratio.index.to_numpy(np.float64))
        return np.interp(np.log2(np.maximum(steps.decodes, 1.0)), sizes, ratio.to_numpy())


def padded(tokens: FloatArray, max_num_seqs: int) -> FloatArray:
    """Tokens rounded up to the next captured CUDA graph, as vLLM's defaults have them."""
    largest = min(_LARGEST_GRAPH, 2 * max_num_seqs)
    sizes = np.array([1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST_GRAPH + 1, 16)], float)
    sizes = sizes[sizes <= largest]
    place = np.minimum(np.searchsorted(sizes, tokens), len(sizes) - 1)
    return np.where(tokens <= sizes[-1], sizes[place], tokens)


def find_profiles(root: Path) -> list[Path]:
    """The folders below `root` that hold a layer profile."""
    found = {path.parent for path in root.rglob("dense.csv*")}
    return sorted(folder for folder in found if _table_path(folder, "attention") is not None)


def profile_meta(folder: Path) -> dict[str, object]:
    """What `meta.yaml` beside the folder says of it.

    Raises:
        TableError: there is none, or it is not a mapping.
    """
    path = folder.parent / "meta.yaml"
    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise TableError(
            str(path), value=type(error).__name__, bound="readable YAML with gpu and model"
        ) from None
    if not isinstance(meta, dict) or not {"gpu", "model"} <= meta.keys():
        raise TableError(str(path), value="no gpu or model", bound="a mapping with gpu and model")
    return meta


def read_profile(folder: Path, shape: ModelShape) -> LayerProfile:
    """Read one profile folder.

    Raises:
        TableError: a table is missing or lacks a column.
    """
    meta = profile_meta(folder)
    dense = _read(folder, "dense", ("layer", "tokens", "time_us"))
    heads = _read(folder, "per_sequence", ("layer", "sequences", "time_us"))
    mixture = _table_path(folder, "moe") is not None
    skewed = _table_path(folder, "skew") is not None
    return LayerProfile(
        folder=folder,
        hardware=str(meta.get("hardware", folder.parts[-5] if len(folder.parts) > 4 else "")),
        gpu=str(meta["gpu"]),
        model=str(meta["model"]),
        shape=shape,
        dense=_pivot(dense, "tokens"),
        per_sequence=_pivot(heads, "sequences"),
        attention=_read(folder, "attention", (*_AXES, "time_us")),
        moe=_read(folder, "moe", ("tokens", "activated_experts", "time_us")) if mixture else None,
        skew=_read(folder, "skew", ("regime", "n", "ratio", "kv_mean", "t_mean_us", "t_skew_us"))
        if skewed
        else None,
    )


def _table_path(folder: Path, name: str) -> Path | None:
    found = (folder / f"{name}.csv{ending}" for ending in ("", ".gz"))
    return next((path for path in found if path.is_file()), None)


def _read(folder: Path, name: str, columns: tuple[str, ...]) -> pd.DataFrame:
    path = _table_path(folder, name)
    if path is None:
        raise TableError(str(folder), value=f"no {name}.csv", bound=f"a folder with {name}.csv")
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise TableError(str(path), value=str(error).split("\n")[0], bound="CSV") from None
    missing = [column for column in columns if column not in table.columns]
    if missing or not len(table):
        value = f"no column {missing[0]}" if missing else "no rows"
        raise TableError(str(path), value=value, bound=f"rows with {', '.join(columns)}")
    numbers = [column for column in columns if column not in ("layer", "regime")]
    bad = ~np.isfinite(table[numbers].apply(pd.to_numeric, errors="coerce")).all(axis=1)
    if bad.any():
        row = int(np.argmax(bad.to_numpy())) + 2
        raise TableError(f"{path} row {row}", value="not a number", bound="numbers")
    return table


def _pivot(table: pd.DataFrame, size: str) -> pd.DataFrame:
    wide = table.pivot_table(index=size, columns="layer", values="time_us")
    return wide.interpolate(method="index").bfill().ffill()


def _line(sizes: FloatArray, values: FloatArray, at: FloatArray) -> FloatArray:
    """Linear between the measured sizes and, with the last slope, beyond them."""
    inside = np.interp(at, sizes, values)
    if len(sizes) < 2:
        return inside
    back = max(0, len(sizes) - 1 - max(1, len(sizes) // 4))
    slope = (values[-1] - values[back]) / (sizes[-1] - sizes[back])
    line: FloatArray = inside + slope * np.maximum(at - sizes[-1], 0.0)
    return line


def _filled(table: pd.DataFrame) -> FloatArray:
    """The table with its gaps filled along the rows, then along the columns."""
    full = table.interpolate(axis=1, limit_direction="both").interpolate(limit_direction="both")
    return full.to_numpy(np.float64)


def _grid(table: pd.DataFrame, axes: tuple[str, ...]) -> RegularGridInterpolator:
    wide = table.pivot_table(index=axes[0], columns=axes[1], values="time_us").sort_index()
    sizes = wide.index.to_numpy(np.float64), wide.columns.to_numpy(np.float64)
    values = np.array([_extended(sizes[1], row) for row in wide.to_numpy(np.float64)])
    return RegularGridInterpolator(sizes, values, bounds_error=False, fill_value=None)


def _extended(sizes: FloatArray, row: FloatArray) -> FloatArray:
    """A row with its unmeasured sizes interpolated, beyond the last one with its slope."""
    known = np.flatnonzero(~np.isnan(row))
    return _line(sizes[known], row[known], sizes)


def _complete_grid(table: pd.DataFrame) -> tuple[tuple[FloatArray, ...], FloatArray]:
    """The largest grid of sizes that was measured at every point: rarely measured sizes go."""
    kept = table
    while True:
        axes = [np.unique(kept[axis].to_numpy(np.float64)) for axis in _AXES]
        full = int(np.prod([len(axis) for axis in axes]))
        if len(kept) == full or min(len(axis) for axis in axes) < 2:
            break
        share = [
            (float(count) * len(axis) / full, name, value)
            for name, axis in zip(_AXES, axes, strict=True)
            for value, count in kept[name].value_counts().items()
        ]
        _, name, value = min(share)
        kept = kept[kept[name] != value]
    places = [np.searchsorted(axis, kept[n]) for axis, n in zip(axes, _AXES, strict=True)]
    values = np.full([len(axis) for axis in axes], np.nan)
    values[tuple(places)] = kept["time_us"].to_numpy(np.float64)
    return tuple(axes), values
