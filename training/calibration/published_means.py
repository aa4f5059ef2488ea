"""Runs of which only means are published: `<name>_latency.tsv`, a row a framework.

In the layout of LLMServingSim's artifact: nothing of the engine is recorded, so model, parallel
size and limits are assumed and the comparison is coarse. `MD` in the name means two engines.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Final

import numpy as np

from trimtab.engine_bridge.errors import TableError
from trimtab.training.calibration.cards import find_card, scaled_engine
from trimtab.training.calibration.measured import Measured, open_text
from trimtab.training.calibration.models import find_model
from trimtab.training.calibration.published import Case, engine_spec
from trimtab.training.calibration.replayed import Setting, trace_of

_COLUMNS: Final = ("framework", "mean_ttft_ms", "mean_tpot_ms")
_MODEL, _TP, _SEQS, _BUDGET = "Llama-3.1-70B", 4, 128, 2048
_VERSION: Final = "0.13.0"
_WORKLOAD: Final = "*_llama.jsonl*"


def find_mean_runs(root: Path) -> list[Path]:
    """Tables of means with a row of vLLM."""
    return sorted(path for path in root.rglob("*_latency.tsv") if "vLLM" in _rows(path))


def means_case(root: Path, path: Path) -> Case:
    """One table's means of vLLM, predicted from the data sheet of the card.

    Raises:
        TableError: the card is not known or the workload is not there.
    """
    card = find_card(str(path.relative_to(root.parent)))
    shape = find_model(_MODEL)
    rows = _rows(path)
    true = rows.pop("vLLM")
    engines = 2 if path.name.startswith("MD") else 1
    spec, note = engine_spec(
        shape,
        card,
        scaled_engine(shape, card, _TP),
        tp=_TP,
        version=_VERSION,
        max_num_seqs=_SEQS,
        max_num_batched_tokens=_BUDGET,
        enable_prefix_caching="PC" in path.name,
    )
    requests = _requests(root, path, *true)
    return Case(
        name=str(path.relative_to(root)),
        engine=f"{_MODEL} {card.name}, TP {_TP}, engines {engines} (assumed)",
        calibrated_on="nothing: the shipped 8B engine scaled by data sheets",
        requests=requests,
        trace=trace_of(requests),
        setting=Setting(spec=spec, engines=engines),
        judged=np.arange(len(requests)),
        means_only=True,
        published={
            name: {
                "ttft": {"mean": ttft / true[0] - 1.0},
                "tpot": {"mean": tpot / true[1] - 1.0},
            }
            for name, (ttft, tpot) in rows.items()
        },
        notes=(note, "coarse: version, limits and eager mode are not recorded"),
    )


def _rows(path: Path) -> dict[str, tuple[float, float]]:
    rows = {}
    for row in csv.DictReader(open_text(path), delimiter="\t"):
        try:
            name, ttft, tpot = (row[column] for column in _COLUMNS)
            rows[name] = (float(ttft), float(tpot))
        except (KeyError, TypeError, ValueError):
            return {}
    return rows


def _requests(root: Path, path: Path, ttft_ms: float, tpot_ms: float) -> Measured:
    """The workload's requests, each with the measured means."""
    found = sorted(root.rglob(f"workloads/{_WORKLOAD}"))
    if not found:
        raise TableError(str(path), value="no workload", bound=f"a file workloads/{_WORKLOAD}")
    items = [json.loads(text) for text in open_text(found[0]) if text.strip()]
    n = len(items)
    start = np.array([item["arrival_time_ns"] for item in items], np.float64) * 1e-9
    output = np.array([item["output_toks"] for item in items], np.float64)
    decode = (output - 1.0) * tpot_ms * 1e-3
    return Measured(
        row=np.arange(n),
        start_s=np.maximum.accumulate(start - start.min()),
        prompt_tokens=np.array([max(1, item["input_toks"]) for item in items], np.float64),
        output_tokens=output,
        ttft_s=np.full(n, ttft_ms * 1e-3),
        e2e_s=ttft_ms * 1e-3 + decode,
        decode_s=decode,
        prefill_s=np.full(n, np.nan),
        host_s=np.full(n, np.nan),
    )
