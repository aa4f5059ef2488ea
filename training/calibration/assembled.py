"""Puts an engine file together from whatever was measured of an engine.

Kernel tables give the shape, step logs and isolated requests the level; the KV capacity comes from
a log or from the card's memory. Files are read by the modules that know their layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from trimtab.engine_bridge.encoder_spec import EncoderFile
from trimtab.engine_bridge.engine_file import EngineFile, EngineLimits
from trimtab.engine_bridge.engine_spec import find_engine_file
from trimtab.engine_bridge.errors import FlagError, TableError
from trimtab.engine_bridge.step_time import COEFFICIENTS, CoefArray
from trimtab.training.calibration.capacity_guess import estimated_memory, logged_blocks
from trimtab.training.calibration.cards import Card, find_card, scaled_engine
from trimtab.training.calibration.draws import Limits, draw_steps
from trimtab.training.calibration.encoder_fit import fit_encoder
from trimtab.training.calibration.fit import error_report, fit_coefficients
from trimtab.training.calibration.isolated import Isolated, fit_isolated
from trimtab.training.calibration.kernel_bench import KernelBench, is_kernel_bench
from trimtab.training.calibration.kernel_fit import fit_profile
from trimtab.training.calibration.layer_profile import find_profiles, read_profile
from trimtab.training.calibration.measured import read_client
from trimtab.training.calibration.models import ModelShape, find_model
from trimtab.training.calibration.published_spans import isolated_requests
from trimtab.training.calibration.step_fit import fit_step_log
from trimtab.training.calibration.step_log import joined, read_step_log

_ROWS: Final = 3000
_PRECISIONS: Final = ("bf16", "fp16", "fp8", "int4")
_UTILIZATION: Final = 0.9


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Measurements and facts of one engine, as the command line has them."""

    kernels: Path | None
    steps: tuple[Path, ...]
    requests: Path | None
    model: str
    model_config: Path | None
    card: str
    tp: int
    precision: str
    log: Path | None
    num_gpu_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    context_tokens: float
    base: str
    """Engine to start from; empty: the shipped one, scaled to model and card."""
    seed: int


def assembled_engine(sources: Sources, *, name: str) -> EngineFile:
    """Fit an engine to all the measurements that are given, in the order kernels, steps, requests.

    Args:
        sources: what was measured.
        name: name of the engine; empty: made of card, model and size.

    Raises:
        FlagError: a flag is out of bounds or lacking.
        TableError: a file cannot be used.
    """
    shape, card = _checked(sources)
    memory = estimated_memory(
        shape,
        card,
        tp=sources.tp,
        gpu_memory_utilization=_UTILIZATION,
        max_num_seqs=sources.max_num_seqs,
        max_num_batched_tokens=sources.max_num_batched_tokens,
        precision=sources.precision,
    )
    blocks = sources.num_gpu_blocks or (logged_blocks(sources.log) if sources.log else 0)
    if sources.log and not blocks:
        raise TableError(str(sources.log), value="no KV blocks", bound="a start-up log of vLLM")
    paths = _log_files(sources.steps)
    logs = joined([read_step_log(path) for path in paths]) if paths else None
    if logs and not len(logs.table):
        raise TableError(
            str(sources.steps[0]),
            value=f"{len(logs.encoding)} steps, all with media",
            bound="steps without media",
            remedy="log steps of text too: they tell the language model's times",
        )
    if logs and not blocks:
        blocks = logs.num_gpu_blocks
    draft = EngineFile(
        name=name or f"{card.name.lower()}:{shape.name.lower()}-tp{sources.tp}",
        model=shape.name,
        gpu=card.name,
        tp=sources.tp,
        memory=memory,
        limits=EngineLimits(
            max_num_seqs=sources.max_num_seqs,
            max_num_batched_tokens=sources.max_num_batched_tokens,
            num_gpu_blocks=blocks or None,
        ),
        coefficients={title: 0.0 for title, _, _ in COEFFICIENTS},
    )
    if draft.blocks() < 1:
        raise FlagError(
            "--card",
            value=sources.card,
            bound=f"GPUs that hold {memory.weights_gib:.0f} GiB of weights",
            remedy="raise --tp or give --kv-blocks",
        )
    coef = _start(sources, shape, card)
    encoder: EncoderFile | None = None
    told: list[str] = []
    errors: dict[str, Any] = {}
    if sources.kernels:
        coef, errors["kernels"] = _from_kernels(sources, shape, card, draft.blocks() * 16)
        told.append(f"kernel tables {sources.kernels.name}")
    if logs:
        coef = fit_step_log(logs.table, coef)
        errors["steps"] = error_report(coef, logs.table)
        told.append(f"{len(logs.table)} steps of {', '.join(path.name for path in sources.steps)}")
        encoder = fit_encoder(logs.encoding, logs.encoded, coef)
        if encoder is not None:
            told.append(f"{len(logs.encoding)} steps that encoded media")
    if sources.requests:
        requests = _isolated(sources.requests)
        coef, host_s = fit_isolated(
            coef, requests, max_num_batched_tokens=sources.max_num_batched_tokens
        )
        errors["host_s_per_prompt"] = round(host_s, 5)
        told.append(f"{len(requests)} isolated requests of {sources.requests.name}")
    values = {
        title: float(f"{value:.5g}")
        for (title, _, _), value in zip(COEFFICIENTS, coef, strict=True)
    }
    return draft.model_copy(
        update={
            "coefficients": values,
            "encoder": encoder,
            "fidelity": {"sources": told, "relative_error": _rounded(errors)},
        }
    )


def _checked(sources: Sources) -> tuple[ModelShape, Card]:
    base = find_engine_file(sources.base) if sources.base else None
    bounds = (
        ("--tp", sources.tp, 1 <= sources.tp <= 64, "from 1 to 64"),
        ("--max-num-seqs", sources.max_num_seqs, sources.max_num_seqs >= 1, "at least 1"),
        (
            "--max-num-batched-tokens",
            sources.max_num_batched_tokens,
            sources.max_num_batched_tokens >= 32,
            "at least 32",
        ),
        ("--context", sources.context_tokens, sources.context_tokens >= 1, "at least 1"),
        ("--kv-blocks", sources.num_gpu_blocks, sources.num_gpu_blocks >= 0, "at least 0"),
        ("--seed", sources.seed, sources.seed >= 0, "at least 0"),
        (
            "--precision",
            sources.precision,
            sources.precision in _PRECISIONS,
            f"one of {', '.join(_PRECISIONS)}",
        ),
    )
    for flag, value, good, bound in bounds:
        if not good:
            raise FlagError(flag, value=value, bound=bound)
    model = sources.model or (base.model if base else "")
    card = sources.card or (base.gpu if base else "")
    if not card or not (model or sources.model_config):
        lacking = "--card" if not card else "--model"
        raise FlagError(lacking, value="", bound="given", remedy="say what was measured")
    shape = ModelShape.from_config(sources.model_config) if sources.model_config else None
    return shape or find_model(model), find_card(card)


def _log_files(given: tuple[Path, ...]) -> list[Path]:
    """The logs, and in place of a folder the Parquet files in it."""
    files: list[Path] = []
    for path in given:
        inside = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not inside:
            raise TableError(str(path), value="no Parquet file", bound="a folder of step logs")
        files += inside
    return files


def _start(sources: Sources, shape: ModelShape, card: Card) -> CoefArray:
    if sources.base:
        return np.array(list(find_engine_file(sources.base).coefficients.values()))
    return scaled_engine(shape, card, sources.tp, precision=sources.precision)


def _from_kernels(
    sources: Sources, shape: ModelShape, card: Card, kv_tokens: int
) -> tuple[CoefArray, dict[str, Any]]:
    assert sources.kernels is not None
    limits = Limits(
        max_num_seqs=sources.max_num_seqs,
        max_num_batched_tokens=sources.max_num_batched_tokens,
        kv_tokens=kv_tokens,
        typical_context_tokens=sources.context_tokens,
    )
    if is_kernel_bench(sources.kernels):
        bench = KernelBench(sources.kernels, shape, sources.tp)
        steps = draw_steps(limits, np.random.default_rng(sources.seed), _ROWS)
        table = bench.steps(steps, max_num_seqs=sources.max_num_seqs)
        base = _start(sources, shape, card)
        reduce = [i for i, (title, _, _) in enumerate(COEFFICIENTS) if title.startswith("allred")]
        collectives = base[reduce]
        base[reduce] = 0.0
        coef = fit_coefficients(table, base)
        report = error_report(coef, table)
        coef[reduce] = collectives
        return coef, report
    profiles = find_profiles(sources.kernels)
    fitting = [path for path in profiles if path.name == f"tp{sources.tp}"] or profiles
    if len(fitting) != 1:
        raise TableError(
            str(sources.kernels),
            value=f"{len(fitting)} profiles",
            bound=f"one layer profile, in a folder tp{sources.tp}, or gemm and mha",
            remedy="name the folder of one model",
        )
    return fit_profile(
        read_profile(fitting[0], shape), card, limits, tp=sources.tp, seed=sources.seed
    )


def _isolated(path: Path) -> Isolated:
    if path.is_dir():
        return isolated_requests(path)[0]
    measured = read_client(path)
    alone = measured.take(measured.alone())
    return Isolated(
        prompt_tokens=alone.prompt_tokens,
        cached_tokens=np.zeros(len(alone)),
        output_tokens=alone.output_tokens,
        prefill_s=alone.ttft_s,
        tpot_s=alone.tpot_s,
    )


def _rounded(errors: dict[str, Any]) -> dict[str, Any]:
    """Plain numbers of 4 decimals, as an engine file can hold them."""
    plain: dict[str, Any] = {}
    for key, value in errors.items():
        if isinstance(value, dict):
            plain[key] = _rounded(value)
        elif value is not None:
            plain[key] = round(value, 5) if isinstance(value, float) else value
    return plain
