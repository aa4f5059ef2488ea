"""First guesses of an engine that nobody has profiled: a measured engine scaled to other hardware.

The guess carries the shape of the step-time model; its level comes from measurements of the card
(`isolated`, `step_log`). Data-sheet numbers only; no measured run is looked at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.errors import TableError
from trimtab.engine_bridge.step_time import COEF_LEN, COEFFICIENTS, CoefArray
from trimtab.training.calibration.models import ModelShape, find_model

_BASE: Final = "h100:llama-3.1-8b-tp1"
_INDEX: Final = {name: place for place, (name, _, _) in enumerate(COEFFICIENTS)}
_NVLINK_US: Final = 6.7
"""One all-reduce of a few tokens inside a CUDA graph, as in the shipped 70B engines."""
_PCIE_US: Final = 25.0
"""The same over PCIe, by NCCL."""
_NVLINK_GB_S: Final = 200.0
_LINK_PART: Final = 0.63
"""Reached part of a link's rate, as in the shipped 70B engines."""
_MIXED_READS: Final = 0.5
_MIXED_REQUEST_US: Final = 0.5
_MIXED_GRID_NS: Final = 1.0
"""FlashAttention 2 beside a chunk, a layer: more KV reads, more time a request and a request times
chunk token, as profiles of RTX 4090 and RTX PRO 6000 have them for 4 query heads a KV head."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU's data sheet."""

    name: str
    memory_tb_s: float
    bf16_tflops: float
    link_gb_s: float
    memory_gib: float
    """As CUDA reports it."""
    hopper: bool = False
    """Whether vLLM runs FlashAttention 3 on it."""


CARDS: Final = (
    Card(name="A100", memory_tb_s=2.04, bf16_tflops=312, link_gb_s=300, memory_gib=79.1),
    Card(
        name="H100",
        memory_tb_s=3.35,
        bf16_tflops=989,
        link_gb_s=450,
        memory_gib=79.1,
        hopper=True,
    ),
    Card(
        name="H200",
        memory_tb_s=4.8,
        bf16_tflops=989,
        link_gb_s=450,
        memory_gib=139.8,
        hopper=True,
    ),
    Card(name="B200", memory_tb_s=8.0, bf16_tflops=2250, link_gb_s=900, memory_gib=178.4),
    Card(name="L4", memory_tb_s=0.3, bf16_tflops=121, link_gb_s=32, memory_gib=22.0),
    Card(name="L40S", memory_tb_s=0.864, bf16_tflops=362, link_gb_s=32, memory_gib=44.4),
    Card(name="A10G", memory_tb_s=0.6, bf16_tflops=70, link_gb_s=32, memory_gib=22.1),
    Card(name="RTX3090", memory_tb_s=0.936, bf16_tflops=71, link_gb_s=32, memory_gib=23.6),
    Card(name="RTX4090", memory_tb_s=1.008, bf16_tflops=165, link_gb_s=32, memory_gib=23.5),
    Card(name="RTX5090", memory_tb_s=1.79, bf16_tflops=210, link_gb_s=64, memory_gib=31.4),
    Card(name="RTXPRO6000", memory_tb_s=1.6, bf16_tflops=504, link_gb_s=64, memory_gib=94.9),
)


def find_card(text: str) -> Card:
    """The card whose name stands in a text, for instance a folder's name.

    Raises:
        TableError: none does.
    """
    plain = re.sub(r"[^a-z0-9]", "", text.casefold())
    fitting = [card for card in CARDS if card.name.casefold() in plain]
    if not fitting:
        known = ", ".join(card.name for card in CARDS)
        raise TableError("card", value=text, bound=f"text that names one of {known}")
    return max(fitting, key=lambda card: len(card.name))


def scaled_engine(
    shape: ModelShape, card: Card, tp: int, *, precision: str = "bf16", mixed: bool | None = None
) -> CoefArray:
    """Coefficients of the shipped 8B engine, scaled to another model, card and number of GPUs.

    Bytes scale with the memory's bandwidth, multiplications with the peak rate, launches with the
    layers, all-reduces with layers, width and link.

    Args:
        shape: the model.
        card: each of the GPUs.
        tp: tensor-parallel size.
        precision: of the weights, `bf16`, `fp8` or `int4`.
        mixed: whether decodes beside a chunk are dearer; None: unless the card is a Hopper.
    """
    coef = get_engine_spec(_BASE).coef
    from_shape, from_card = find_model("Llama-3.1-8B"), find_card("H100")
    layers = shape.layers / from_shape.layers
    memory = from_card.memory_tb_s / card.memory_tb_s
    compute = from_card.bf16_tflops / card.bf16_tflops
    shared = _weights(shape, everything=False) / tp
    base = _weights(from_shape, everything=False)
    size = {"bf16": 1.0, "fp16": 1.0, "fp8": 0.5, "int4": 0.25}[precision]
    faster = 0.5 if precision == "fp8" and from_card.hopper else 1.0
    active = _weights(shape, everything=False, active=True) / tp
    heads = shape.heads * shape.head_dim / tp / (from_shape.heads * from_shape.head_dim)
    kv = max(1.0, shape.kv_heads / tp) * shape.head_dim
    factors = np.ones(COEF_LEN)
    _scale(factors, ("weights_ms", "tile_ms"), shared / base * size * memory)
    _scale(factors, ("weights_us_per_token", "tile_us_per_token"), active / base * compute * faster)
    _scale(factors, ("compute_ms", "compute_us_per_token"), active / base * compute * faster)
    head = shape.vocab * shape.hidden / tp / (from_shape.vocab * from_shape.hidden)
    _scale(factors, ("sequence_us",), head * compute)
    _scale(factors, ("prefill_launch_ms", "decode_launch_ms"), layers)
    _scale(factors, ("pair_base_ms", "decode_batch_ms"), layers)
    _scale(factors, ("prefill_us_per_token", "pair_ns"), layers * heads * compute)
    _scale(factors, ("decode_us_per_request", "decode_batch_us_per_request"), layers * heads)
    _scale(factors, ("kv_ns_per_token",), layers * kv / (8 * 128) * memory)
    coef *= factors
    if shape.experts:
        _add_experts(coef, shape, tp, size * memory)
    if tp > 1:
        add_collectives(coef, shape, card, tp)
    if mixed or (mixed is None and not card.hopper):
        share = shape.heads / tp / 32 * shape.layers
        coef[_INDEX["mixed_us_per_request"]] = _MIXED_REQUEST_US * share
        packed = _MIXED_READS if shape.heads > shape.kv_heads else 0.0
        coef[_INDEX["mixed_kv_ns_per_token"]] = packed * coef[_INDEX["kv_ns_per_token"]]
        coef[_INDEX["mixed_grid_ns"]] = _MIXED_GRID_NS * share
    return coef


def add_collectives(coef: CoefArray, shape: ModelShape, card: Card, gpus: int) -> None:
    """Put the collectives of every layer, two over `gpus` GPUs, into the coefficients.

    All-reduces of tensor parallelism, or the gather and scatter around experts that are spread.
    """
    each_us = _NVLINK_US if card.link_gb_s >= _NVLINK_GB_S else _PCIE_US
    coef[_INDEX["allreduce_ms"]] = 2 * shape.layers * each_us * 1e-3
    moved = 2 * shape.layers * shape.hidden * 2 * 2 * (gpus - 1) / gpus
    coef[_INDEX["allreduce_us_per_token"]] = moved / (_LINK_PART * card.link_gb_s * 1e3)


def _add_experts(coef: CoefArray, shape: ModelShape, tp: int, slower: float) -> None:
    """Take the experts out of the weights that every step reads; a token adds its own."""
    experts = shape.layers * 3 * shape.hidden * shape.mlp * shape.experts / tp
    from_shape = find_model("Llama-3.1-8B")
    base_ms = get_engine_spec(_BASE).coef[_INDEX["weights_ms"]]
    coef[_INDEX["experts_ms"]] = base_ms * slower * experts / _weights(from_shape, everything=False)
    chance = shape.active_experts / shape.experts
    coef[_INDEX["experts_per_token"]] = min(0.9, -np.log1p(-min(chance, 0.6)))


def _weights(shape: ModelShape, *, everything: bool, active: bool = False) -> float:
    """Weights outside the embedding; without experts, or with those that one token takes."""
    attention = shape.hidden * (shape.qkv_width + shape.heads * shape.head_dim)
    width = float(shape.mlp if not shape.experts else shape.shared_mlp)
    if shape.experts and (active or everything):
        width += shape.mlp * (shape.experts if everything else shape.active_experts)
    return shape.layers * (attention + 3.0 * shape.hidden * width)


def _scale(factors: CoefArray, names: tuple[str, ...], factor: float) -> None:
    factors[[_INDEX[name] for name in names]] = factor
