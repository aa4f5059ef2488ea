"""Runs in the layout of llm-d-benchmark: a folder of CSV files, one a load, as a client saw them.

The folder's name tells card, model and sizes. Of each workload the lowest load calibrates; the
other loads are judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from trimtab.engine_bridge.errors import TableError
from trimtab.training.calibration.cards import find_card, scaled_engine
from trimtab.training.calibration.measured import (
    CLIENT_COLUMNS,
    Measured,
    open_text,
    read_client,
)
from trimtab.training.calibration.models import find_model
from trimtab.training.calibration.published import (
    Case,
    default_limits,
    described,
    engine_spec,
)
from trimtab.training.calibration.replayed import Setting, fit_replayed, trace_of

_LOAD: Final = re.compile(r"^(.*?)(\d+(?:\.\d+)?)$")
_VERSION: Final = "0.8.5"
"""Of the image that the runs used, by its date; the data does not record it."""
_UTILIZATION: Final = 0.95


@dataclass(frozen=True, kw_only=True)
class _Load:
    path: Path
    workload: str
    rate: float
    requests: Measured


def find_client_runs(root: Path) -> list[Path]:
    """Folders with CSV files of a client's requests."""
    folders = sorted({path.parent for path in root.rglob("*.csv")})
    return [folder for folder in folders if any(_is_client(path) for path in folder.glob("*.csv"))]


def client_cases(root: Path, folder: Path) -> Iterator[Case]:
    """The loads of a folder but the lowest of each workload, which calibrates the engine.

    Raises:
        TableError: the card or model is not known, or a workload has one load only.
    """
    name = folder.name
    shape, card = find_model(name), find_card(name)
    tp = int(_number(name, r"tp(\d+)") or 1)
    engines = int(_number(name, r"-x(\d+)") or 1)
    precision = "fp8" if "fp8" in name.casefold() else "bf16"
    loads = sorted(
        (_load(path) for path in sorted(folder.glob("*.csv")) if _is_client(path)),
        key=lambda load: (load.workload, load.rate),
    )
    workloads = sorted({load.workload for load in loads})
    lowest = [next(load for load in loads if load.workload == workload) for workload in workloads]
    if len(loads) == len(lowest):
        raise TableError(
            str(folder), value="one load of each workload", bound="two: the lowest calibrates"
        )
    seqs, budget = default_limits(card, _VERSION)
    base = scaled_engine(shape, card, tp, precision=precision)
    spec, note = engine_spec(
        shape,
        card,
        base,
        tp=tp,
        version=_VERSION,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        gpu_memory_utilization=_UTILIZATION,
        precision=precision,
    )
    setting = Setting(spec=spec, engines=engines)
    runs = [(trace_of(load.requests), load.requests) for load in lowest]
    coef, reply_s = fit_replayed(base, runs, setting)
    fitted = Setting(
        spec=replace(spec, coefficients=tuple(coef.tolist())), engines=engines, reply_s=reply_s
    )
    for load in loads:
        if load in lowest:
            continue
        yield Case(
            name=str(load.path.relative_to(root)),
            engine=described(
                {shape.name: card.name, "TP": tp, "engines": engines if engines > 1 else None}
                | {"vLLM": "of May 2025"}
            ),
            calibrated_on="lowest loads: " + ", ".join(low.path.name for low in lowest),
            requests=load.requests,
            trace=trace_of(load.requests),
            setting=fitted,
            judged=np.arange(len(load.requests)),
            notes=(note, "version and limits are assumed"),
        )


def _is_client(path: Path) -> bool:
    header = next(iter(open_text(path)), "").strip().split(",")
    return set(CLIENT_COLUMNS) <= set(header)


def _load(path: Path) -> _Load:
    found = _LOAD.match(path.stem)
    requests = read_client(path)
    return _Load(
        path=path,
        workload=found[1] if found else path.stem,
        rate=float(found[2]) if found else 0.0,
        requests=requests,
    )


def _number(text: str, pattern: str) -> str:
    found = re.search(pattern, text.casefold())
    return found[1] if found else ""
