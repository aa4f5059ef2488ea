"""Runs in the layout of LLMServingSim: `<card>/<model>/requests.jsonl` with `meta.json`.

The engine is calibrated on the kernel profile of the same card and model; the run is only judged.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import numpy as np

from trimtab.engine_bridge.errors import TableError
from trimtab.engine_bridge.step_time import CoefArray
from trimtab.training.calibration.cards import Card, find_card, scaled_engine
from trimtab.training.calibration.draws import Limits
from trimtab.training.calibration.kernel_fit import fit_profile
from trimtab.training.calibration.layer_profile import (
    find_profiles,
    profile_meta,
    read_profile,
)
from trimtab.training.calibration.measured import Measured, open_text, read_bench
from trimtab.training.calibration.models import ModelShape, find_model
from trimtab.training.calibration.published import (
    Case,
    default_limits,
    described,
    engine_spec,
    is_asynchronous,
)
from trimtab.training.calibration.replayed import Setting, trace_of

_SUMMARY: Final = re.compile(
    r"^(TTFT|TPOT|Latency)\s+(Mean|Median|P\d+)\s+([\d.]+)\s+([\d.]+)\s+([+-][\d.]+)%", re.MULTILINE
)
_QUANTITY: Final = {"TTFT": "ttft", "TPOT": "tpot", "Latency": "e2e"}
_STATISTIC: Final = {"Mean": "mean", "Median": "p50", "P99": "p99"}


def find_bench_runs(root: Path) -> list[Path]:
    """Folders with `requests.jsonl` and `meta.json`."""
    found = {path.parent for path in root.rglob("requests.jsonl*")}
    return sorted(folder for folder in found if (folder / "meta.json").is_file())


def bench_case(root: Path, folder: Path) -> Case:
    """One run, its engine calibrated on the profile of its card.

    Raises:
        TableError: a file is broken, or the card or model is not known.
    """
    meta = _meta(folder / "meta.json")
    arguments: dict[str, Any] = meta.get("engine_kwargs") or {}
    resolved: dict[str, Any] = (meta.get("resolved_config") or {}).get("scheduler_config") or {}
    model = str(meta.get("model") or arguments.get("model") or folder.name)
    shape = find_model(model)
    card = _card(folder, meta)
    requests = read_bench(next(folder.glob("requests.jsonl*")))
    tp = int(arguments.get("tensor_parallel_size") or 1)
    engines = int(arguments.get("data_parallel_size") or 1)
    spread = bool(arguments.get("enable_expert_parallel")) and shape.experts > 0
    version = str(meta.get("vllm_version", ""))
    seqs, budget = default_limits(card, version)
    seqs = int(resolved.get("max_num_seqs") or arguments.get("max_num_seqs") or seqs)
    budget = int(
        resolved.get("max_num_batched_tokens") or arguments.get("max_num_batched_tokens") or budget
    )
    cache: dict[str, Any] = meta.get("kv_cache") or {}
    blocks = int(cache.get("num_gpu_blocks") or 0)
    # Engines that share experts step together: one engine of their joint size stands for them.
    joint = engines if shape.experts and engines > 1 else 1
    placed, block_note = engine_spec(
        shape,
        card,
        np.zeros(1),
        tp=tp * joint if spread else tp,
        version=version,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        num_gpu_blocks=blocks * joint,
        gpu_memory_utilization=float(cache.get("gpu_memory_utilization") or 0.9),
        enable_prefix_caching=bool(cache.get("enable_prefix_caching", True)),
    )
    limits = Limits(
        max_num_seqs=seqs * joint,
        max_num_batched_tokens=budget * joint,
        kv_tokens=placed.kv_tokens,
        typical_context_tokens=_typical_context(requests),
        engines=joint,
    )
    coef, source = _calibrated(root, model, shape, card, tp, limits, spread=spread)
    spec, _ = engine_spec(
        shape,
        card,
        coef,
        tp=tp,
        version=version,
        max_num_seqs=seqs * joint,
        max_num_batched_tokens=budget * joint,
        num_gpu_blocks=placed.num_gpu_blocks,
        enable_prefix_caching=placed.enable_prefix_caching,
    )
    prefixes, prefix_note = _prefixes(root, meta, requests)
    ahead = resolved.get("async_scheduling")
    joint_note = f"{engines} engines in lock step replayed as one" if joint > 1 else ""
    return Case(
        name=str(folder.relative_to(root)),
        engine=described(
            {shape.name: card.name, "TP": tp, "DP": engines if engines > 1 else None}
            | {"vLLM": version, "seqs": seqs, "budget": budget}
        ),
        calibrated_on=source,
        requests=requests,
        trace=trace_of(requests, prefixes),
        setting=Setting(
            spec=spec,
            asynchronous=is_asynchronous(version) if ahead is None else bool(ahead),
            engines=1 if joint > 1 else engines,
            from_queue=True,
        ),
        judged=np.arange(len(requests)),
        published=_published(folder),
        notes=tuple(note for note in (block_note, prefix_note, joint_note) if note),
    )


def _meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(str(path), value=str(error).split("\n")[0], bound="JSON") from None
    if not isinstance(meta, dict):
        raise TableError(str(path), value=type(meta).__name__, bound="a JSON object")
    return meta


def _card(folder: Path, meta: dict[str, Any]) -> Card:
    named = str((meta.get("hardware") or {}).get("device_name", ""))
    try:
        return find_card(folder.parent.name)
    except TableError:
        return find_card(named or folder.parent.name)


def _typical_context(requests: Measured) -> float:
    """Mean context while decoding, over tokens: a fact of the workload, not of the run."""
    weights = requests.output_tokens
    context = requests.prompt_tokens + 0.5 * requests.output_tokens
    return float(np.sum(weights * context) / np.sum(weights))


def _calibrated(
    root: Path,
    model: str,
    shape: ModelShape,
    card: Card,
    tp: int,
    limits: Limits,
    *,
    spread: bool,
) -> tuple[CoefArray, str]:
    for folder in find_profiles(root):
        meta = profile_meta(folder)
        hardware = str(meta.get("hardware") or meta["gpu"])
        same = find_card(hardware) == card and find_model(str(meta["model"])) == find_model(model)
        if same and folder.name == f"tp{tp}":
            profile = read_profile(folder, shape)
            coef, errors = fit_profile(profile, card, limits, tp=tp, expert_parallel=spread)
            median = f"fit within {errors['median']:.1%}"
            return coef, f"kernel profile {folder.relative_to(root)} ({median})"
    coef = scaled_engine(shape, card, tp)
    return coef, "no profile of this card, model and TP: data sheet only"


def _prefixes(root: Path, meta: dict[str, Any], requests: Measured) -> tuple[list[list[int]], str]:
    """Prefix ids of every request, from the workload that has the same lengths."""
    wanted = Path(str(meta.get("dataset_path", ""))).name
    files = sorted(
        root.rglob("workloads/*.jsonl*"),
        key=lambda path: (not path.name.startswith(wanted or "\0"), path.name),
    )
    for path in files:
        items = [json.loads(line) for line in open_text(path) if line.strip()]
        lengths = [int(item.get("input_toks", -1)) for item in items]
        if len(items) > requests.row.max() and np.array_equal(
            np.array(lengths)[requests.row], requests.prompt_tokens
        ):
            return [list(items[row].get("block_ids_16", ())) for row in requests.row], ""
    return [], "workload not found: no prefix is shared"


def _published(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """The authors' summary of their own simulator, as fractions."""
    report: dict[str, dict[str, float]] = {}
    for path in sorted(folder.glob("*simulator-summary*.txt")):
        for quantity, statistic, true, told, _ in _SUMMARY.findall(path.read_text()):
            if statistic in _STATISTIC and float(true) > 0:
                errors = report.setdefault(_QUANTITY[quantity], {})
                errors[_STATISTIC[statistic]] = float(told) / float(true) - 1.0
    return {"authors": report} if report else {}
