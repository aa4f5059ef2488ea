"""Run by `test_greedy.py` in an environment of its own: a true forward pass, greedy, on a CPU.

    python greedy_model.py FOLDER stock|fair on|off

Makes a tiny Llama in FOLDER, runs prompts with shared beginnings through vLLM's offline interface,
and prints one line of JSON: the answers' token ids, preemptions, and blocks found cached.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD, MLP, LAYERS, WORDS = 64, 2, 1, 32, 128, 2, 512
PROMPTS, OUTPUT_TOKENS = 20, 60
KV_BLOCKS, BLOCK_TOKENS, SEQUENCES = 24, 32, 8


def make_model(folder: Path) -> None:
    """Weights large enough that what is far back in the context changes the answer."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "num_hidden_layers": LAYERS,
        "vocab_size": WORDS,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Any:
        scale = gain / np.sqrt(columns)
        return rng.normal(0.0, scale, (rows, columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(WORDS, HIDDEN, 8.0),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(WORDS, HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights |= {
            f"{name}self_attn.q_proj.weight": matrix(HEADS * HEAD, HIDDEN, 2.0),
            f"{name}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN, 2.0),
            f"{name}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN, 2.0),
            f"{name}self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD, 2.0),
            f"{name}mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            f"{name}mlp.up_proj.weight": matrix(MLP, HIDDEN),
            f"{name}mlp.down_proj.weight": matrix(HIDDEN, MLP),
            f"{name}input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{name}post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        }
    save_file(weights, str(folder / "model.safetensors"), {"format": "pt"})


def _patient_plan(folder: Path) -> str:
    """The shipped plan that gives nobody up: this CPU is slower than any target."""
    from trimtab.engine_bridge import plan

    text = (Path(plan.__file__).parent / "default.yaml").read_text()
    assert "late_shedding: true" in text
    path = folder / "patient.yaml"
    path.write_text(text.replace("late_shedding: true", "late_shedding: false"))
    return str(path)


def main(folder: Path, scheduler: str, caching: bool) -> None:
    """Run one scheduler and print what came out."""
    make_model(folder)
    from vllm import LLM, SamplingParams

    extra: dict[str, Any] = {}
    if scheduler == "fair":
        extra = {
            "scheduler_cls": "trimtab.engine_bridge.vllm.FairScheduler",
            "scheduling_policy": "priority",
            "additional_config": {"trimtab": {"plan": _patient_plan(folder)}},
        }
    model = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=KV_BLOCKS,
        max_num_seqs=SEQUENCES,
        max_model_len=512,
        max_num_batched_tokens=512,
        enable_prefix_caching=caching,
        disable_log_stats=False,
        seed=0,
        **extra,
    )
    rng = np.random.default_rng(1)
    shared = rng.integers(3, WORDS, (3, 3 * BLOCK_TOKENS)).tolist()
    prompts, asked = [], []
    for number in range(PROMPTS):
        own = rng.integers(3, WORDS, rng.integers(1, 40)).tolist()
        prompts.append({"prompt_token_ids": shared[number % 3] + own})
        labels = {"trimtab_tier": f"T{number % 4}", "trimtab_tenant": f"tenant-{number % 3}"}
        asked.append(
            SamplingParams(
                temperature=0.0,
                max_tokens=OUTPUT_TOKENS,
                ignore_eos=True,
                detokenize=False,
                extra_args=labels,
            )
        )
    answers = model.generate(prompts, asked, use_tqdm=False)
    counters = {metric.name: getattr(metric, "value", 0) for metric in model.get_metrics()}
    found = {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "preemptions": counters.get("vllm:num_preemptions", 0),
        "cached_tokens": counters.get("vllm:prefix_cache_hits", 0),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "on")
