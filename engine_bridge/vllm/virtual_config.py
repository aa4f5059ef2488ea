"""vLLM configurations for `virtual_time`: of a tiny model, without a GPU. Nothing is served."""

from __future__ import annotations

import json
import os
import tempfile
from functools import lru_cache
from pathlib import Path

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from trimtab.engine_bridge.engine_spec import EngineSpec

MOST_TOKENS = 1 << 20
"""Longest sequence that the fake model takes."""


@lru_cache(maxsize=1)
def _model_config() -> ModelConfig:
    """A tiny model's config: the scheduler asks it for little more than its longest sequence."""
    folder = Path(tempfile.mkdtemp(prefix="trimtab-virtual-vllm-"))
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "num_key_value_heads": 1,
                "vocab_size": 128,
                "max_position_embeddings": MOST_TOKENS,
                "torch_dtype": "float32",
            }
        )
    )
    return ModelConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MOST_TOKENS,
        seed=0,
    )


@lru_cache(maxsize=64)
def vllm_config(
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    blocks: int,
    caching: bool,
    policy: str,
    additional_config: str,
    draft_tokens: int,
) -> VllmConfig:
    """A configuration of the limits that matter to the scheduler; drafts come from look-ups."""
    model_config, parallel_config = _model_config(), ParallelConfig()
    config = VllmConfig(
        model_config=model_config,
        parallel_config=parallel_config,
        speculative_config=SpeculativeConfig(
            # Drafts by look-up: the scheduler needs no draft model for them.
            method="ngram",
            num_speculative_tokens=draft_tokens,
            prompt_lookup_max=4,
            target_model_config=model_config,
            target_parallel_config=parallel_config,
        )
        if draft_tokens
        else None,
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=caching),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MOST_TOKENS,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            policy=policy,
            async_scheduling=False,
        ),
        additional_config=json.loads(additional_config),
    )
    config.cache_config.num_gpu_blocks = blocks
    return config


def kv_cache_config(spec: EngineSpec) -> KVCacheConfig:
    """One group of full attention with the engine's blocks; nothing is ever stored in them."""
    attention = FullAttentionSpec(
        block_size=spec.block_size, num_kv_heads=1, head_size=32, dtype=_model_config().dtype
    )
    return KVCacheConfig(
        num_blocks=spec.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
    )
