"""One measured configuration, ready to be replayed; and what its settings follow from.

The modules `published_*` make it from a layout of published data. Nothing is replayed here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.kv_memory import kv_blocks
from trimtab.engine_bridge.step_time import CoefArray
from trimtab.engine_bridge.trace import Trace
from trimtab.training.calibration.capacity_guess import estimated_memory
from trimtab.training.calibration.cards import Card
from trimtab.training.calibration.measured import Measured
from trimtab.training.calibration.models import ModelShape
from trimtab.training.calibration.replayed import Setting

_ASYNCHRONOUS_SINCE: Final = (0, 14)
_FEWER_SINCE: Final = (0, 9)
_LARGE_GIB: Final = 70.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that was measured, and the engine that is to predict it."""

    name: str
    """Path below the data folder."""
    engine: str
    """Model, card, parallel sizes and version."""
    calibrated_on: str
    """Data that the step times come from; none of it is judged."""
    requests: Measured
    trace: Trace
    setting: Setting
    judged: npt.NDArray[np.int64]
    """Requests that the error is taken over."""
    means_only: bool = False
    """Whether the requests carry the means of the run instead of their own latencies."""
    published: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Errors that are published of other simulators, by name, as `replayed.comparison` has them."""
    notes: tuple[str, ...] = ()
    """What is assumed or estimated."""


def is_asynchronous(version: str) -> bool:
    """Whether a version of vLLM schedules a step ahead unless told otherwise."""
    return release(version) >= _ASYNCHRONOUS_SINCE


def release(version: str) -> tuple[int, int]:
    """Major and minor number of a vLLM version; a recent one where it is not known."""
    parts = version.lstrip("v").split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return (0, 19)


def default_limits(card: Card, version: str) -> tuple[int, int]:
    """VLLM's `max_num_seqs` and `max_num_batched_tokens` for its server where none is given."""
    large = card.memory_gib >= _LARGE_GIB and card.name != "A100"
    many = large or release(version) < _FEWER_SINCE
    return (1024 if many else 256), (8192 if large else 2048)


def engine_spec(
    shape: ModelShape,
    card: Card,
    coef: CoefArray,
    *,
    tp: int,
    version: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_gpu_blocks: int = 0,
    gpu_memory_utilization: float = 0.9,
    precision: str = "bf16",
    enable_prefix_caching: bool = True,
) -> tuple[EngineSpec, str]:
    """The engine, and a note where its KV blocks are estimated (no blocks given)."""
    note = ""
    if not num_gpu_blocks:
        memory = estimated_memory(
            shape,
            card,
            tp=tp,
            gpu_memory_utilization=gpu_memory_utilization,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            counts_graphs=is_asynchronous(version),
            sorts_logits=release(version) < _FEWER_SINCE,
            precision=precision,
        )
        num_gpu_blocks = max(64, kv_blocks(**memory.model_dump(), tp=tp, block_size=16))
        note = f"KV blocks estimated: {num_gpu_blocks}"
    spec = EngineSpec(
        name=f"{card.name}:{shape.name}-tp{tp}",
        model=shape.name,
        gpu=card.name,
        tp=tp,
        coefficients=tuple(float(value) for value in coef),
        num_gpu_blocks=num_gpu_blocks,
        kv_bytes_per_token=round(shape.kv_kib_per_token() * 1024),
        cost_per_hour=0.0,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
    return spec, note


def described(values: dict[str, Any]) -> str:
    """Settings as one line, those without a value left out."""
    return ", ".join(f"{key} {value}" for key, value in values.items() if value not in (None, ""))
