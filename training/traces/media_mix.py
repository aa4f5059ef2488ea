"""What images and audio synthetic chats and agents bring along: how many, and of how many tokens.

The sizes resemble public data (docs/traces.md says which), the shares are made up. It places
nothing; `traffic` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.media import AUDIO, IMAGE
from trimtab.training.traces.lengths import Lognormal

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class MediaMix:
    """The items that the turns of one tier bring."""

    image: Lognormal
    """Tokens of an image."""
    audio: Lognormal
    """Tokens of a clip."""
    audio_fraction: float
    """Share of the items that are clips of audio."""
    items_mean: float
    """Items of a turn that brings any."""
    most_items: int

    def draw(
        self, turns: int, share: float, rng: np.random.Generator
    ) -> tuple[LongArray, LongArray, LongArray]:
        """Draw what each turn brings.

        Args:
            turns: How many turns there are.
            share: Part of them that brings any item.
            rng: Draws everything.

        Returns:
            Items of each turn, shape (turns,); kind and tokens of each item, in their order.
        """
        brings = rng.random(turns) < share
        some = np.minimum(rng.geometric(1.0 / self.items_mean, turns), self.most_items)
        counts = np.where(brings, some, 0).astype(np.int64)
        items = int(counts.sum())
        kind = np.where(rng.random(items) < self.audio_fraction, AUDIO, IMAGE).astype(np.int64)
        image, audio = self.image.tokens(items, rng), self.audio.tokens(items, rng)
        return counts, kind, np.where(kind == AUDIO, audio, image)


_CLIP: Final = Lognormal(median=250, sigma=0.8, low=25, high=750)
"""10 s in the median and at most 30 s, at 25 tokens a second as Qwen2-Audio has them: chosen."""
CHAT_MEDIA: Final = MediaMix(
    # ServeGen's mm-image clients: 4 to 1280 tokens, medians from 252 to 1230, heavy at the cap.
    image=Lognormal(median=700, sigma=0.7, low=4, high=1280),
    audio=_CLIP,
    audio_fraction=0.1,
    items_mean=1.3,
    most_items=8,
)
AGENT_MEDIA: Final = MediaMix(
    # Screenshots: most of ServeGen's clients whose images are all of one size are near the cap.
    image=Lognormal(median=1200, sigma=0.1, low=400, high=1280),
    audio=_CLIP,
    audio_fraction=0.0,
    items_mean=1.0,
    most_items=1,
)
