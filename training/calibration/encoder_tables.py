"""Makes an engine's `encoder` section out of the kernel tables of the package aiconfigurator.

A vision transformer is composed kernel by kernel, as `generate` composes the language model; it
measures nothing itself. What the tables lack is the host: an encoder that runs without a graph is
never faster than its launches. The package wants an environment of its own:
`pip install aiconfigurator==0.12.0`, then `python -m trimtab.training.calibration.encoder_tables`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from trimtab.engine_bridge.errors import FlagError, TrimtabError, did_you_mean
from trimtab.training.calibration.generate import BACKEND, BACKEND_VERSION, SYSTEM

FloatArray = npt.NDArray[np.float64]

_LAUNCH_MS: Final = 0.010
"""One kernel's launch from Python without a graph: reckoned."""
_LAUNCHES_A_LAYER: Final = 14
"""Kernels of a layer with its copies, in vLLM's own model code: counted."""
_US_PER_MS, _NS_PER_MS = 1e3, 1e6
_MEMORY_PART: Final = 0.8
"""Reached part of the memory's rate in kernels that only move data, as the package has it."""
_SMALLEST_FITTED: Final = 64
"""Smaller images take what their launches take; fitted, they would cost the others accuracy."""


@dataclass(frozen=True, kw_only=True)
class VisionShape:
    """One vision transformer whose output is merged into the language model's tokens."""

    name: str
    layers: int
    full_layers: int
    """Layers that attend over the whole image; the others look around inside windows."""
    window_patches: int
    hidden: int
    heads: int
    mlp: int
    """Width of the gated MLP."""
    patch_values: int
    """Values of one patch: channels, frames and pixels."""
    merge: int
    """Patches that become one token of the language model."""
    text_hidden: int
    image_tokens: tuple[int, int]
    """Least and most tokens of an image, as the model's processor cuts them."""
    frame_tokens: int
    """Most tokens of a frame of video, of which each attends over itself alone."""


SHAPES: Final = (
    # Sizes as in the model's config.json and preprocessor_config.json.
    VisionShape(
        name="Qwen2.5-VL-7B",
        layers=32,
        full_layers=4,
        window_patches=64,
        hidden=1280,
        heads=16,
        mlp=3420,
        patch_values=1176,
        merge=4,
        text_hidden=3584,
        image_tokens=(4, 16_384),
        frame_tokens=768,
    ),
)


class EncoderTables:
    """Encode times of one vision transformer on one GPU."""

    def __init__(self, shape: VisionShape) -> None:
        """Load the kernel tables.

        Raises:
            FlagError: the package is not installed.
        """
        try:
            sdk = "aiconfigurator_core.sdk"
            self._engine: Any = importlib.import_module(f"{sdk}.engine")
            self._ops: Any = importlib.import_module(f"{sdk}.operations")
            common: Any = importlib.import_module(f"{sdk}.common")
            databases: Any = importlib.import_module(f"{sdk}.perf_database")
        except ImportError:
            raise FlagError(
                "aiconfigurator",
                value="not installed",
                bound="installed",
                remedy="pip install aiconfigurator==0.12.0",
            ) from None
        self.shape = shape
        self._matmul, self._mha = common.GEMMQuantMode.bfloat16, common.FMHAQuantMode.bfloat16
        database = databases.get_database(SYSTEM, BACKEND, BACKEND_VERSION)
        self._handle: Any = self._engine.EngineHandle.for_database(database)

    def encode_ms(self, tokens: int) -> float:
        """Time of encoding one image of so many of the language model's tokens, milliseconds.

        The kernels one after another, or the launches where those are slower.
        """
        shape = self.shape
        patches = tokens * shape.merge
        windows = -(-patches // shape.window_patches)
        kernels = self._sum(self._layer(), 1, patches)
        inside = shape.layers - shape.full_layers
        kernels += self._sum([self._attention(inside)], windows, shape.window_patches)
        kernels += self._sum([self._attention(shape.full_layers)], 1, patches)
        kernels += self._sum([self._product(shape.hidden, shape.patch_values)], 1, patches)
        kernels += self._sum(self._merger(), 1, tokens)
        return max(kernels, shape.layers * _LAUNCHES_A_LAYER * _LAUNCH_MS)

    def _layer(self) -> list[Any]:
        shape = self.shape
        times = shape.layers
        return [
            self._move(2 * shape.hidden, 2 * shape.hidden, times),
            self._product(3 * shape.hidden, shape.hidden, times),
            self._move(6 * shape.hidden, 6 * shape.hidden, times),
            self._product(shape.hidden, shape.hidden, times),
            self._move(2 * shape.hidden, 2 * shape.hidden, times),
            self._product(2 * shape.mlp, shape.hidden, times),
            self._move(2 * shape.mlp, shape.mlp, times),
            self._product(shape.hidden, shape.mlp, times),
        ]

    def _merger(self) -> list[Any]:
        wide = self.shape.merge * self.shape.hidden
        return [
            self._product(wide, wide),
            self._move(wide, wide),
            self._product(self.shape.text_hidden, wide),
        ]

    def _product(self, outputs: int, inputs: int, times: int = 1) -> Any:
        return self._ops.GEMM("product", times, outputs, inputs, self._matmul)

    def _move(self, inputs: int, outputs: int, times: int = 1) -> Any:
        return self._ops.ElementWise("move", times, inputs, outputs, _MEMORY_PART)

    def _attention(self, times: int) -> Any:
        shape = self.shape
        return self._ops.EncoderAttention(
            "attention",
            times,
            shape.heads,
            shape.hidden // shape.heads,
            fmha_quant_mode=self._mha,
            partial_rotary_factor=0.0,
        )

    def _sum(self, ops: list[Any], batch: int, size: int) -> float:
        total = 0.0
        # One by one: equal names of one call would be folded into one another.
        for op in ops:
            found = self._handle.evaluate_ops_json(
                self._engine.build_ops_json([op]),
                is_context=True,
                batch_size=batch,
                s=size,
                x=batch * size,
            )
            total += sum(float(latency_ms) for _, latency_ms, *_ in found)
        return total


def fitted_costs(tokens: FloatArray, times_ms: FloatArray) -> tuple[float, float, float]:
    """Least relative squares of `item_ms`, `us_per_token` and `pair_ns`, none below 0.

    Args:
        tokens: Sizes of the items, shape (n,).
        times_ms: What each takes, milliseconds, shape (n,).
    """
    terms = np.stack([np.ones_like(tokens), tokens / _US_PER_MS, tokens**2 / _NS_PER_MS], axis=1)
    found, _ = nnls(terms / times_ms[:, None], np.ones_like(times_ms))
    item_ms, us_per_token, pair_ns = (float(value) for value in found)
    return item_ms, us_per_token, pair_ns


def encoder_section(tables: EncoderTables, sizes: int = 60) -> dict[str, Any]:
    """The `encoder` section for an engine file, and under `fit` how well its lines hold.

    A frame of a video attends over itself alone, so that a long one costs no more a token.
    """
    least, most = tables.shape.image_tokens
    tokens = np.unique(np.rint(np.geomspace(max(least, _SMALLEST_FITTED), most, sizes)))
    times = np.array([tables.encode_ms(int(size)) for size in tokens])
    item_ms, us_per_token, pair_ns = fitted_costs(tokens, times)
    error = np.abs((item_ms + us_per_token * tokens / _US_PER_MS
                    + pair_ns * tokens**2 / _NS_PER_MS) / times - 1.0)  # fmt: skip
    frame = tables.shape.frame_tokens
    return {
        "image": {
            "item_ms": round(item_ms, 3),
            "us_per_token": round(us_per_token, 3),
            "pair_ns": round(pair_ns, 4),
        },
        "video": {
            "item_ms": round(item_ms, 3),
            "us_per_token": round(tables.encode_ms(frame) / frame * _US_PER_MS, 3),
        },
        "fit": {
            "sizes": len(tokens),
            "median": round(float(np.median(error)), 4),
            "p95": round(float(np.quantile(error, 0.95)), 4),
            "max": round(float(error.max()), 4),
        },
        "examples_ms": {
            str(size): round(tables.encode_ms(size), 2) for size in (256, 576, 1024, 2691, 16_384)
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one section as JSON; returns the exit code."""
    names = [shape.name for shape in SHAPES]
    parser = argparse.ArgumentParser(prog="python -m trimtab.training.calibration.encoder_tables")
    parser.add_argument("--model", required=True, help=f"one of {', '.join(names)}")
    flags = parser.parse_args(arguments)
    try:
        if flags.model not in names:
            raise FlagError(
                "--model",
                value=flags.model,
                bound=f"one of {', '.join(names)}",
                remedy=did_you_mean(flags.model, names),
            )
        tables = EncoderTables(SHAPES[names.index(flags.model)])
        print(json.dumps(encoder_section(tables), indent=2))
    except TrimtabError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
