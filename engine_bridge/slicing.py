"""Where a long prompt is cut: the lengths of its prefixes that are read one after the other.

Cuts depend on the place in the prompt only, not on its length, so that all turns of a conversation
are cut alike and what one has read the next one finds. Who sends the prefixes is the gateway's
business (`gateway.slices`), who replays them `training.whatif.slicing`'s. Slices of equal time
(later ones shorter, since attention reads all that lies before) did others no more good than as
many slices of equal length (docs/slicing.md).
"""

from __future__ import annotations

from typing import Final

ALIGN_TOKENS: Final = 64
"""Cuts are multiples of it, and so of the usual sizes of a KV block: vLLM keeps whole blocks."""


def cuts(prompt_tokens: int, slice_tokens: int) -> list[int]:
    """Lengths of a prompt's prefixes that are read before it, tokens, growing.

    Args:
        prompt_tokens: Length of the prompt.
        slice_tokens: What the tier's plan says; rounded down to whole blocks.
    """
    step = max(1, slice_tokens // ALIGN_TOKENS) * ALIGN_TOKENS
    return list(range(step, prompt_tokens, step))
