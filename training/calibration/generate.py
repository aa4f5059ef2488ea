"""Makes tables of step times out of the kernel tables of the public package aiconfigurator.

It measures nothing itself. The package is optional and wants an environment of its own:
`pip install aiconfigurator==0.12.0`, then `python -m trimtab.training.calibration.generate`.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.engine_bridge.errors import FlagError, TrimtabError
from trimtab.training.calibration.models import find_model

SYSTEM, BACKEND, BACKEND_VERSION = "h100_sxm", "vllm", "0.24.0"
GPU = "H100-SXM-80GB"
MODELS = {
    "Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen2.5-VL-7B": None,
}
"""Models by name: which of the package's own configurations; None: made from our shapes."""
COLUMNS = (
    *("model", "gpu", "tp", "kind", "prefill_tokens", "prefill_prefix", "prefill_chunks"),
    *("decode_batch", "decode_context", "iter_ms", "nonattn_ms", "allreduce_ms"),
    *("prefill_attn_ms", "decode_attn_ms", "source", "provenance"),
)

_OPS = range(14)
_LONGEST_STEP_TOKENS = 16_384
_LONGEST_CONTEXT_TOKENS = 131_072
_LONGEST_DECODE_CONTEXT_TOKENS = 32_768
_LARGEST_BATCH = 256
_MOST_KV_TOKENS = 256 * 8192
_MOST_CHUNKS = 4


class KernelTables:
    """One model on `tp` GPUs, step times composed operation by operation."""

    def __init__(self, model: str, tp: int) -> None:
        """Load the kernel tables.

        Raises:
            FlagError: the model is not known here, or the package is not installed.
        """
        if model not in MODELS:
            raise FlagError("--model", value=model, bound=f"one of {', '.join(MODELS)}")
        try:
            engine = importlib.import_module("aiconfigurator_core.sdk.engine")
        except ImportError:
            raise FlagError(
                "aiconfigurator",
                value="not installed",
                bound="installed",
                remedy="pip install aiconfigurator==0.12.0",
            ) from None
        self.model, self.tp = model, tp
        with tempfile.TemporaryDirectory() as folder:
            self._engine: Any = engine.EngineHandle.compile(
                MODELS[model] or _configured(model, Path(folder)),
                SYSTEM,
                BACKEND,
                backend_version=BACKEND_VERSION,
                tp_size=tp,
            )

    def row(
        self, *, chunks: int, chunk_tokens: int, prefix_tokens: int, batch: int, context_tokens: int
    ) -> dict[str, object]:
        """One step: equal chunks after equal prefixes, beside a decode batch of equal contexts.

        Attention of the chunks and of the batch are two kernels; everything else is one pass over
        all tokens, with one output head a request.
        """
        tokens = chunks * chunk_tokens + batch
        prefill = decode = 0.0
        if chunks:
            ops = self._engine.evaluate_context_ops(
                _OPS, batch_size=chunks, s=chunk_tokens, prefix=prefix_tokens
            )
            prefill = _sum(ops, "attention")
        if batch:
            ops = self._engine.evaluate_generation_ops(_OPS, batch_size=batch, s=context_tokens)
            decode = _sum(ops, "attention")
        if chunks:
            ops = self._engine.evaluate_context_ops(_OPS, batch_size=1, s=tokens, prefix=0)
            heads = self._engine.evaluate_generation_ops(_OPS, batch_size=chunks + batch, s=1)
            other = _sum(ops) - _sum(ops, "attention") - _sum(ops, "logits")
            other += _sum(heads, "logits")
        else:
            other = _sum(ops) - decode
        kind = ("mixed" if batch else "prefill") if chunks else "decode"
        names = {"prefill": "prefill_chunk_with_prefix", "mixed": "mixed_prefix"}
        return {
            "model": self.model,
            "gpu": GPU,
            "tp": self.tp,
            "kind": names.get(kind, kind) if prefix_tokens else kind,
            "prefill_tokens": chunks * chunk_tokens,
            "prefill_prefix": prefix_tokens,
            "prefill_chunks": chunks,
            "decode_batch": batch,
            "decode_context": context_tokens,
            "iter_ms": round(other + prefill + decode, 4),
            "nonattn_ms": round(other, 4),
            "allreduce_ms": round(_sum(ops, "_ar"), 4),
            "prefill_attn_ms": round(prefill, 4),
            "decode_attn_ms": round(decode, 4),
            "source": f"aiconfigurator 0.12.0, {SYSTEM} / vLLM {BACKEND_VERSION} kernel tables",
            "provenance": "composed per op by trimtab.training.calibration.generate",
        }


def _configured(model: str, folder: Path) -> str:
    """Write the configuration of a model's language part into a folder; returns the folder."""
    shape = find_model(model)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": _LONGEST_CONTEXT_TOKENS,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def draw_steps(rng: np.random.Generator, rows: int) -> Iterator[dict[str, int]]:
    """Random steps: 40 % decode, 30 % prefill, 30 % mixed; sizes uniform in the logarithm.

    Chunks hold 16 to 16,384 tokens (all together at most 16,384) after 0 to 128k cached ones
    (none in one case of three); decode batches 1 to 256 requests of 64 to 32,768 tokens, all
    together at most 2.1 million, which is more than the KV cache of any of the engines holds.
    """

    def draw(low: int, high: int) -> int:
        return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))

    for _ in range(rows):
        region = rng.choice(3, p=(0.4, 0.3, 0.3))
        step = dict.fromkeys(("chunks", "chunk_tokens", "prefix_tokens"), 0)
        step.update(batch=0, context_tokens=0)
        if region != 1:
            step["batch"] = draw(1, _LARGEST_BATCH)
            longest = min(_LONGEST_DECODE_CONTEXT_TOKENS, _MOST_KV_TOKENS // step["batch"])
            step["context_tokens"] = draw(64, longest)
        if region != 0:
            step["chunks"] = int(rng.integers(1, _MOST_CHUNKS + 1)) if rng.random() < 0.5 else 1
            longest = (_LONGEST_STEP_TOKENS - step["batch"]) // step["chunks"]
            step["chunk_tokens"] = draw(16, longest)
            if rng.random() > 1 / 3:
                step["prefix_tokens"] = draw(16, _LONGEST_CONTEXT_TOKENS - step["chunk_tokens"])
        yield step


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trimtab.training.calibration.generate")
    parser.add_argument("--model", required=True, help=f"one of {', '.join(MODELS)}")
    parser.add_argument("--tp", type=int, required=True, help="tensor-parallel size")
    parser.add_argument("--rows", type=int, default=4000, help="steps to draw (default 4000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    flags = parser.parse_args(arguments)
    try:
        tables = KernelTables(flags.model, flags.tp)
        steps = draw_steps(np.random.default_rng(flags.seed), flags.rows)
        with flags.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(tables.row(**step) for step in steps)
    except (TrimtabError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return 0


def _sum(ops: Sequence[tuple[str, float, float, str]], part: str = "") -> float:
    return float(sum(latency_ms for name, latency_ms, *_ in ops if part in name))


if __name__ == "__main__":
    sys.exit(main())
