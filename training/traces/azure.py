"""Read the Azure LLM inference traces (2023 and 2024 releases): time stamp, prompt, output.

It invents no users and no sessions: the release has none.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.assemble import Column, build_sorted
from trimtab.training.traces.options import Label, ReadOptions
from trimtab.training.traces.table import Chunk, read_chunks

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_NS = 1e9


def read_azure(path: Path, rng: np.random.Generator, label: Label, options: ReadOptions) -> Trace:
    """Read one CSV file of the release; times count from its earliest row.

    Args:
        path: File, plain or gzip.
        rng: Not used: the format leaves nothing to chance.
        label: Tier and tenant of every row.
        options: Not used.

    Raises:
        TraceError: a cell is not what its column says.
    """
    stamps_ns = Column(np.int64)
    prompt, output = Column(np.int32), Column(np.int32)
    for chunk in read_chunks(path, wanted=COLUMNS):
        stamps_ns.extend(_stamps_ns(chunk))
        prompt.extend(chunk.integers("ContextTokens", low=1))
        output.extend(chunk.integers("GeneratedTokens", low=1))
    # Whole nanoseconds are subtracted before they become floats: at 1.7e18 ns since 1970 a float
    # would be 256 ns coarse, and the file is exact to 100 ns.
    stamps = stamps_ns.finish()
    stamps -= stamps.min()
    return build_sorted(
        path.name,
        arrival_s=stamps / _NS,
        prompt_tokens=prompt.finish(),
        output_tokens=output.finish(),
        tier_names=(label.tier,),
        tenant_names=(label.tenant,),
    )


def _stamps_ns(chunk: Chunk) -> npt.NDArray[np.int64]:
    texts = chunk.texts("TIMESTAMP")
    # The 2024 release writes an offset after the time, the 2023 release does not.
    zoned = pc.any(pc.match_substring_regex(texts, r"(Z|[+-]\d\d:?\d\d)$")).as_py()
    kind = pa.timestamp("ns", "UTC") if zoned else pa.timestamp("ns")
    try:
        stamps = pc.cast(texts, kind)
    except pa.ArrowInvalid:
        for index, text in enumerate(texts):
            try:
                pc.cast(text, kind)
            except pa.ArrowInvalid:
                raise TraceError(
                    chunk.place(index),
                    key="TIMESTAMP",
                    value=text.as_py(),
                    bound="a time such as 2023-11-16 18:15:46.6805900",
                ) from None
        raise
    values: npt.NDArray[np.int64] = pc.cast(stamps, pa.int64()).to_numpy(zero_copy_only=False)
    return values
