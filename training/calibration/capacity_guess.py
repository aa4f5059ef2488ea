"""KV blocks of an engine: as its log says, or estimated from the card's memory.

The estimate's constants come from start-up logs of vLLM 0.11 and 0.15 (docs/fidelity.md).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Final

from trimtab.engine_bridge.engine_file import EngineMemory
from trimtab.training.calibration.cards import Card
from trimtab.training.calibration.measured import open_text
from trimtab.training.calibration.models import ModelShape

_CONTEXT_GIB: Final = 0.15
_ACTIVATIONS: Final = 1.5
"""Peak of a step's activations over those of the widest layer."""
_LOGITS: Final = 3.0
"""Peak of the sampler's copies over one of the logits in float32."""
_LOGITS_SORTED: Final = 7.5
"""The same where the trial run sorts them (vLLM before 0.9 without FlashInfer's sampler): values,
64-bit indices, softmax, running sums and masks."""
_PARALLEL_GIB: Final = 0.4
_GRAPHS_GIB: Final = 0.4
"""What CUDA graphs take, where the engine counts them (vLLM since about 0.14)."""
_GIB: Final = 2.0**30
_BLOCKS: Final = re.compile(r"num_gpu_blocks is:\s*(\d+)|# GPU blocks:\s*(\d+)")
_TOKENS: Final = re.compile(r"GPU KV cache size:\s*([\d,]+) tokens")
_VERSION: Final = re.compile(r"(?:LLM engine \(v|API server version |vLLM version )(\d+\.\d+\.\d+)")


def overhead_gib(
    shape: ModelShape,
    *,
    tp: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    counts_graphs: bool,
    sorts_logits: bool = False,
) -> float:
    """What one GPU holds beside weights and KV cache, GiB."""
    width = max(2 * shape.mlp, shape.qkv_width) / tp
    activations = _ACTIVATIONS * max_num_batched_tokens * width * 2 / _GIB
    copies = _LOGITS_SORTED if sorts_logits else _LOGITS
    logits = copies * max_num_seqs * shape.vocab * 4 / _GIB
    whole = _CONTEXT_GIB + activations + logits
    whole += _PARALLEL_GIB if tp > 1 else 0.0
    return round(whole + (_GRAPHS_GIB if counts_graphs else 0.0), 3)


def estimated_memory(
    shape: ModelShape,
    card: Card,
    *,
    tp: int,
    gpu_memory_utilization: float,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    counts_graphs: bool = True,
    sorts_logits: bool = False,
    precision: str = "bf16",
) -> EngineMemory:
    """What the KV capacity follows from, for an engine whose log is not at hand."""
    return EngineMemory(
        gpu_memory_gib=card.memory_gib,
        gpu_memory_utilization=gpu_memory_utilization,
        overhead_gib=overhead_gib(
            shape,
            tp=tp,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            counts_graphs=counts_graphs,
            sorts_logits=sorts_logits,
        ),
        weights_gib=round(shape.weights_gib(precision), 3),
        kv_kib_per_token=shape.kv_kib_per_token(),
    )


def logged_blocks(path: Path, *, block_size: int = 16) -> int:
    """KV blocks that a vLLM log names; 0 where it names none."""
    found = 0
    for line in open_text(path):
        blocks, tokens = _BLOCKS.search(line), _TOKENS.search(line)
        if blocks:
            found = int(next(group for group in blocks.groups() if group))
        elif tokens and not found:
            found = math.floor(int(tokens[1].replace(",", "")) / block_size)
    return found


def logged_version(path: Path) -> str:
    """The vLLM version that a log names, or an empty string."""
    for line in open_text(path):
        found = _VERSION.search(line)
        if found:
            return found[1]
    return ""
