"""Read the Azure inference traces: LLM (2023 and 2024 releases) and LMM (2025, with images).

The columns of the LMM release (`AzureLMMInferenceTrace_multimodal.csv`, one week of a multimodal
cluster, described in the ModServe paper, SoCC 2025) are as `AzureLMMInferenceDataset2025.md` and
the notebook beside it in Azure/AzurePublicDataset have them: TIMESTAMP, NumImages, ContextTokens
(text and images), GeneratedTokens. How many tokens an image takes is not told.

It invents no users and no sessions: the releases have none.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.media import IMAGE
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.assemble import Column, build_sorted
from trimtab.training.traces.media_build import at_the_head
from trimtab.training.traces.options import Label, ReadOptions
from trimtab.training.traces.table import Chunk, read_chunks

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
IMAGES = "NumImages"
_MOST_IMAGES = 10_000
LongArray = npt.NDArray[np.int64]
_NS = 1e9


def read_azure(path: Path, rng: np.random.Generator, label: Label, options: ReadOptions) -> Trace:
    """Read one CSV file of a release; times count from its earliest row.

    Images lie at the head of their prompt, one after another, each showing something of its own.
    Rows of 0 tokens of a release with images are left out and counted.

    Args:
        path: File, plain or gzip.
        rng: Not used: the format leaves nothing to chance.
        label: Tier and tenant of every row.
        options: Tokens of an image.

    Raises:
        TraceError: a cell is not what its column says.
    """
    stamps_ns = Column(np.int64)
    prompt, output, images = Column(np.int32), Column(np.int32), Column(np.int64)
    rows, with_images = 0, False
    for chunk in read_chunks(path, wanted=COLUMNS, optional=(IMAGES,)):
        with_images = IMAGES in chunk.columns
        least = 0 if with_images else 1
        prompts = chunk.integers("ContextTokens", low=least)
        outputs = chunk.integers("GeneratedTokens", low=least)
        served = (prompts > 0) & (outputs > 0)
        stamps_ns.extend(_stamps_ns(chunk)[served])
        prompt.extend(prompts[served])
        output.extend(outputs[served])
        if with_images:
            images.extend(chunk.integers(IMAGES, low=0, high=_MOST_IMAGES)[served])
        rows += len(chunk)
    if not len(prompt):
        raise TraceError(path.name, value=f"{rows} rows of 0 tokens", bound="one that was served")
    notes, columns = [], {}
    if rows > len(prompt):
        notes.append(f"{path.name}: {rows - len(prompt):,} rows of 0 tokens left out.")
    prompt_tokens = prompt.finish()
    if with_images:
        counts, tokens, note = _images(images.finish(), prompt_tokens, options.tokens_per_image)
        kind = np.full(int(counts.sum()), IMAGE, np.int64)
        columns["media"] = at_the_head(counts, kind, np.repeat(tokens, counts))
        notes.append(f"{path.name}: {note}")
    # Whole nanoseconds are subtracted before they become floats: at 1.7e18 ns since 1970 a float
    # would be 256 ns coarse, and the file is exact to 100 ns.
    stamps = stamps_ns.finish()
    stamps -= stamps.min()
    return build_sorted(
        path.name,
        arrival_s=stamps / _NS,
        prompt_tokens=prompt_tokens,
        output_tokens=output.finish(),
        tier_names=(label.tier,),
        tenant_names=(label.tenant,),
        notes=tuple(notes),
        **columns,
    )


def _images(
    counts: LongArray, prompt_tokens: npt.NDArray[np.int32], wanted: int
) -> tuple[LongArray, LongArray, str]:
    """Images of each row that its prompt has room for, tokens of each of them, and a note."""
    room = prompt_tokens.astype(np.int64) - 1
    # More images than tokens: as many as there are tokens for.
    held = np.minimum(counts, room)
    tokens = np.minimum(wanted, room // np.maximum(held, 1))
    fewer, shorter = int((held < counts).sum()), int((tokens < wanted)[held > 0].sum())
    note = f"images of {wanted:,} tokens each, which is an assumption"
    if shorter:
        note += f"; fewer in {shorter:,} prompts that are too short for that"
    if fewer:
        note += f"; images left out of {fewer:,} prompts that have no room for them"
    return held, tokens, f"{note}."


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
