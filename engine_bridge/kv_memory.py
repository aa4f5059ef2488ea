"""KV cache capacity of an engine from the memory of its GPUs, in blocks.

It is arithmetic on sizes in GiB and KiB; it asks no GPU and reads no engine file.
"""

from __future__ import annotations

import math

_KIB_PER_GIB = 1024.0 * 1024.0


def kv_blocks(
    *,
    gpu_memory_gib: float,
    gpu_memory_utilization: float,
    overhead_gib: float,
    weights_gib: float,
    tp: int,
    kv_kib_per_token: float,
    block_size: int,
) -> int:
    """Blocks of `block_size` tokens that fit beside the weights, over all `tp` GPUs together.

    Weights and KV cache are split evenly over the GPUs; the overhead (activations, CUDA graphs,
    communication buffers, context) is paid by each of them.

    Args:
        gpu_memory_gib: memory of one GPU as CUDA reports it, GiB.
        gpu_memory_utilization: fraction of it that the engine may use, as in vLLM.
        overhead_gib: what one GPU holds beside weights and KV cache, GiB.
        weights_gib: all weights of the model, GiB.
        tp: tensor-parallel size.
        kv_kib_per_token: KV cache of one token over all GPUs, KiB.
        block_size: tokens in a block.

    Returns:
        Number of blocks; 0 or less where the weights do not fit.
    """
    free_gib = tp * (gpu_memory_gib * gpu_memory_utilization - overhead_gib) - weights_gib
    return math.floor(free_gib * _KIB_PER_GIB / (kv_kib_per_token * block_size))
