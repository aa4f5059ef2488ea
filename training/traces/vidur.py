"""Read vidur's processed traces: request lengths, with or without arrival times."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.assemble import Column, build_sorted
from trimtab.training.traces.options import Label, ReadOptions
from trimtab.training.traces.table import LONGEST_S, read_chunks

COLUMNS = ("num_prefill_tokens", "num_decode_tokens")
ARRIVAL = "arrived_at"


def read_vidur(path: Path, rng: np.random.Generator, label: Label, options: ReadOptions) -> Trace:
    """Read one CSV file; without arrival times all rows are a batch that is submitted at 0 s.

    Args:
        path: File, plain or gzip.
        rng: Not used: the format leaves nothing to chance.
        label: Tier and tenant of every row.
        options: Not used.

    Raises:
        TraceError: a cell is not what its column says.
    """
    arrival = Column(np.float64)
    prompt, output = Column(np.int32), Column(np.int32)
    batch = True
    for chunk in read_chunks(path, wanted=COLUMNS, optional=(ARRIVAL,)):
        batch = ARRIVAL not in chunk.columns
        arrival.extend(
            np.zeros(len(chunk)) if batch else chunk.numbers(ARRIVAL, low=0, high=LONGEST_S)
        )
        prompt.extend(chunk.integers("num_prefill_tokens", low=1))
        output.extend(chunk.integers("num_decode_tokens", low=1))
    note = f"{path.name}: no arrival times; all {len(prompt):,} rows arrive together at 0 s."
    return build_sorted(
        path.name,
        arrival_s=arrival.finish(),
        prompt_tokens=prompt.finish(),
        output_tokens=output.finish(),
        tier_names=(label.tier,),
        tenant_names=(label.tenant,),
        notes=(note,) if batch else (),
    )
