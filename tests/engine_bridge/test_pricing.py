"""What requests ask for, in priced tokens."""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge import pricing
from trimtab.engine_bridge.trace import Trace


def trace_with_prefixes(ids: list[list[int]], prompt: list[int], block: int = 10) -> Trace:
    lengths = [len(row) for row in ids]
    return Trace.build(
        arrival_s=np.arange(len(ids), dtype=float),
        prompt_tokens=prompt,
        output_tokens=[2] * len(ids),
        prefix_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prefix_ids=np.concatenate(ids).astype(np.int32),
        prefix_block_tokens=np.full(len(ids), block, np.int32),
    )


def test_tokens_are_repeated_only_if_an_earlier_row_had_their_prefix() -> None:
    trace = trace_with_prefixes([[0, 1], [0, 1, 2], [0, 3]], [25, 35, 25])
    assert pricing.repeated_prompt_tokens(trace).tolist() == [0, 20, 10]


def test_ids_beyond_the_prompt_repeat_no_prompt_tokens() -> None:
    trace = trace_with_prefixes([[0, 1, 2], [0, 1, 2]], [15, 15])
    assert pricing.repeated_prompt_tokens(trace).tolist() == [0, 15]


def test_a_trace_without_prefixes_repeats_nothing() -> None:
    trace = Trace.build(arrival_s=[0.0, 1.0], prompt_tokens=5, output_tokens=5)
    assert pricing.repeated_prompt_tokens(trace).tolist() == [0, 0]
