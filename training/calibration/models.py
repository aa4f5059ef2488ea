"""The shapes of models: what step times and KV capacity follow from besides the card.

Public facts of the models' own configuration files; it downloads nothing and knows no engine.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from trimtab.engine_bridge.errors import TableError, did_you_mean

_BYTES_PER_GIB: Final = 2**30
_BYTES_PER_VALUE: Final = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int4": 0.5}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """One transformer with grouped-query attention; experts where `experts` is above 0."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Width of the MLP, of one expert in a mixture."""
    vocab: int
    experts: int = 0
    active_experts: int = 0
    shared_mlp: int = 0
    """Width of an expert that every token takes, 0 where there is none."""
    tied: bool = False
    """Whether the output head reuses the embedding."""

    @property
    def qkv_width(self) -> int:
        """Output width of the projection to queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def kv_kib_per_token(self, *, bytes_per_value: float = 2.0) -> float:
        """KV cache of one token over all layers and GPUs, KiB."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value / 1024

    def weights_gib(self, precision: str = "bf16") -> float:
        """All weights, GiB; embedding and head stay in 16 bits under every precision."""
        attention = self.hidden * self.qkv_width + self.heads * self.head_dim * self.hidden
        width = self.mlp * max(1, self.experts) + self.shared_mlp
        layers = self.layers * (attention + 3 * self.hidden * width + self.hidden * self.experts)
        ends = self.vocab * self.hidden * (1 if self.tied else 2)
        return (layers * _BYTES_PER_VALUE[precision] + ends * 2.0) / _BYTES_PER_GIB

    @classmethod
    def from_config(cls, path: Path) -> Self:
        """Read a `config.json` as model repositories have it.

        Raises:
            TableError: the file cannot be read or lacks a size.
        """
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            config = config.get("text_config", config)
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
            return cls(
                name=str(config.get("_name_or_path") or path.parent.name),
                layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                mlp=int(
                    (experts and config.get("moe_intermediate_size")) or config["intermediate_size"]
                ),
                vocab=int(config["vocab_size"]),
                experts=experts,
                active_experts=int(config.get("num_experts_per_tok") or 0),
                tied=bool(config.get("tie_word_embeddings")),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TableError(
                str(path),
                value=f"{type(error).__name__}: {error}",
                bound="a model's config.json",
                remedy="take it from the model's repository",
            ) from None


def _dense(name: str, *sizes: int, tied: bool = False) -> ModelShape:
    layers, hidden, heads, kv_heads, head_dim, mlp, vocab = sizes
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=mlp,
        vocab=vocab,
        tied=tied,
    )


def _mixture(name: str, experts: int, active: int, *sizes: int, shared: int = 0) -> ModelShape:
    layers, hidden, heads, kv_heads, head_dim, mlp, vocab = sizes
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=mlp,
        vocab=vocab,
        experts=experts,
        active_experts=active,
        shared_mlp=shared,
    )


KNOWN: Final = (
    _dense("Llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
    _dense("Llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000),
    _dense("Llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000),
    _dense("CodeLlama-7b", 32, 4096, 32, 32, 128, 11008, 32016),
    _dense("CodeLlama-13b", 40, 5120, 40, 40, 128, 13824, 32016),
    _dense("CodeLlama-34b", 48, 8192, 64, 8, 128, 22016, 32000),
    _dense("CodeLlama-70b", 80, 8192, 64, 8, 128, 28672, 32016),
    _dense("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    _dense("Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256),
    _dense("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    _dense("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256),
    _dense("Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, 128256),
    _dense("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
    _dense("Llama-3.2-3B", 28, 3072, 24, 8, 128, 8192, 128256, tied=True),
    _dense("Llama-3.3-70B", 80, 8192, 64, 8, 128, 28672, 128256),
    _dense("Mistral-7B", 32, 4096, 32, 8, 128, 14336, 32768),
    _dense("Mistral-Nemo", 40, 5120, 32, 8, 128, 14336, 131072),
    _dense("Mistral-Small-24B", 40, 5120, 32, 8, 128, 32768, 131072),
    _dense("Yi-34B", 60, 7168, 56, 8, 128, 20480, 64000),
    _dense("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, tied=True),
    _dense("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, tied=True),
    _dense("Qwen2.5-3B", 36, 2048, 16, 2, 128, 11008, 151936, tied=True),
    _dense("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064),
    _dense("Qwen2.5-14B", 48, 5120, 40, 8, 128, 13824, 152064),
    _dense("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064),
    _dense("Qwen2.5-72B", 80, 8192, 64, 8, 128, 29568, 152064),
    _dense("Qwen2.5-VL-7B", 28, 3584, 28, 4, 128, 18944, 152064),
    _dense("Qwen2-7B", 28, 3584, 28, 4, 128, 18944, 152064),
    _dense("Qwen2-72B", 80, 8192, 64, 8, 128, 29568, 152064),
    _dense("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, tied=True),
    _dense("Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 151936, tied=True),
    _dense("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, tied=True),
    _dense("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936),
    _dense("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936),
    _dense("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936),
    _dense("R1-Distill-Llama-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    _dense("R1-Distill-Llama-70B", 80, 8192, 64, 8, 128, 28672, 128256),
    _dense("R1-Distill-Qwen-7B", 28, 3584, 28, 4, 128, 18944, 152064),
    _dense("R1-Distill-Qwen-14B", 48, 5120, 40, 8, 128, 13824, 152064),
    _dense("R1-Distill-Qwen-32B", 64, 5120, 40, 8, 128, 27648, 152064),
    _dense("Phi-4", 40, 5120, 40, 10, 128, 17920, 100352),
    _dense("Gemma-2-9B", 42, 3584, 16, 8, 256, 14336, 256000, tied=True),
    _dense("Gemma-2-27B", 46, 4608, 32, 16, 128, 36864, 256000, tied=True),
    _mixture("Mixtral-8x7B", 8, 2, 32, 4096, 32, 8, 128, 14336, 32000),
    _mixture("Mixtral-8x22B", 8, 2, 56, 6144, 48, 8, 128, 16384, 32768),
    _mixture("Phi-3.5-MoE", 16, 2, 32, 4096, 32, 8, 128, 6400, 32064),
    _mixture("Qwen3-30B-A3B", 128, 8, 48, 2048, 32, 4, 128, 768, 151936),
    _mixture("Qwen3-235B-A22B", 128, 8, 94, 4096, 64, 4, 128, 1536, 151936),
    _mixture("gpt-oss-20b", 32, 4, 24, 2880, 64, 8, 64, 2880, 201088),
    _mixture("gpt-oss-120b", 128, 4, 36, 2880, 64, 8, 64, 2880, 201088),
    _mixture("Llama-4-Scout", 16, 1, 48, 5120, 40, 8, 128, 8192, 202048, shared=8192),
)
"""Shapes that need no configuration file."""


def find_model(name: str) -> ModelShape:
    """The known shape whose name is the start of a model's name, without owner and case.

    Raises:
        TableError: no known model has such a name.
    """
    wanted = _plain(name)
    fitting = [shape for shape in KNOWN if _plain(shape.name) in wanted]
    if not fitting:
        known = [shape.name for shape in KNOWN]
        raise TableError(
            "model",
            value=name,
            bound="a model whose shape is known",
            remedy=did_you_mean(name.rsplit("/", 1)[-1], known)
            or "give its config.json with --model-config",
        )
    return max(fitting, key=lambda shape: len(shape.name))


def _plain(name: str) -> str:
    """The name without owner, case, punctuation and the words that spellings differ by."""
    last = name.rstrip("/").rsplit("/", 1)[-1].casefold().replace("meta-", "")
    return re.sub(r"[^a-z0-9.]", "", last)
