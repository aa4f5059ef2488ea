"""The Parquet table of a what-if: one row a request, policy and seed, in that order of runs.

Times in seconds from the start of the trace; null where it never happened.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.engine_bridge.atomic import replacing
from trimtab.engine_bridge.trace import Trace
from trimtab.training.whatif.run import Columns, Outcome, Run
from trimtab.training.whatif.variation import vary

OUTCOMES = ("unfinished", "finished", "refused", "shed", "cancelled")

SCHEMA = pa.schema(
    [
        ("policy", pa.dictionary(pa.int32(), pa.string())),
        ("seed", pa.int32()),
        ("request", pa.int32()),
        ("arrival_s", pa.float64()),
        ("tenant", pa.dictionary(pa.int32(), pa.string())),
        ("tier", pa.dictionary(pa.int32(), pa.string())),
        ("admitted_s", pa.float64()),
        ("first_token_s", pa.float64()),
        ("last_token_s", pa.float64()),
        ("prompt_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("generated_tokens", pa.int32()),
        ("preemptions", pa.int32()),
        ("recomputed_tokens", pa.int64()),
        ("outcome", pa.dictionary(pa.int32(), pa.string())),
        ("met_targets", pa.bool_()),
        ("vft_skew", pa.float64()),
        ("service_ms", pa.float64()),
    ]
)


def write_requests(outcome: Outcome, path: Path) -> None:
    """Write the table, a run at a time; the study must have kept its requests."""
    labels = [contender.label for contender in outcome.study.contenders]
    with replacing(path) as target, pq.ParquetWriter(target, SCHEMA) as writer:
        for run in outcome.runs:
            if run.requests is None:
                raise RuntimeError("the study did not keep its requests")
            trace = vary(outcome.study.trace, run.seed)
            writer.write_table(_table(run, run.requests, trace, labels))


def _table(run: Run, rows: Columns, trace: Trace, labels: list[str]) -> pa.Table:
    n = len(trace)

    def named(codes: np.ndarray, names: tuple[str, ...] | list[str]) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(names))

    made = {
        "policy": named(np.full(n, labels.index(run.label)), labels),
        "seed": np.full(n, run.seed),
        "request": np.arange(n),
        "tenant": named(trace.tenant, trace.tenant_names),
        "tier": named(trace.tier, trace.tier_names),
        "outcome": named(rows["outcome"], OUTCOMES),
        "met_targets": run.judged.met.every,
    }
    columns = []
    for field in SCHEMA:
        column = made.get(field.name, rows.get(field.name))
        if isinstance(column, np.ndarray):
            nan_is_null = pa.types.is_floating(field.type)
            column = pa.array(column, from_pandas=nan_is_null).cast(field.type)
        columns.append(column)
    return pa.table(columns, schema=SCHEMA)
