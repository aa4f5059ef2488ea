"""Draw the images, audio and videos of ServeGen's multimodal clients.

The form is as the files of `data/multimodal/mm-image`, the only ones of their kind that were
released, and `tests/test_construct.py` of ServeGen have it: `text_tokens` in place of
`input_tokens`, and for image, audio and video a table of the number in a request (`image_count`)
and one of the tokens of each (`image_tokens`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.media import MEDIA_KINDS
from trimtab.training.traces.assemble import Column
from trimtab.training.traces.servegen_client import Client, nearest_table, picked, windows_of

FloatArray = npt.NDArray[np.float64]
LongArray = npt.NDArray[np.int64]

_MOST_ITEMS: Final = 1000


class DrawnItems:
    """The media of all clients' requests, while they are drawn."""

    def __init__(self) -> None:
        """Start empty."""
        self._counts, self._kind, self._tokens = (Column(np.int64) for _ in range(3))

    def draw(self, client: Client, times_s: FloatArray, rng: np.random.Generator) -> LongArray:
        """Draw what one client's requests show; returns the tokens of it by request."""
        n = len(times_s)
        windows = client.lengths.values()
        shown = [k for k in MEDIA_KINDS if any(f"{k}_count" in window for window in windows)]
        if not client.shows_media or not shown:
            self._counts.extend(np.zeros(n, np.int64))
            return np.zeros(n, np.int64)
        counts = np.zeros((n, len(MEDIA_KINDS)), np.int64)
        starts, window = windows_of(client, times_s)
        tokens = []
        for kind in shown:
            place = MEDIA_KINDS.index(kind)
            of_kind = np.zeros(0, np.int64)
            owner = np.zeros(0, np.int64)
            for number in np.unique(window):
                rows = np.flatnonzero(window == number)
                table = nearest_table(client, starts, int(number), f"{kind}_count", least=0)
                some = np.minimum(picked(table, len(rows), rng), _MOST_ITEMS)
                counts[rows, place] = some
                if some.any():
                    table = nearest_table(client, starts, int(number), f"{kind}_tokens")
                    of_kind = np.r_[of_kind, picked(table, int(some.sum()), rng)]
                    owner = np.r_[owner, np.repeat(rows, some)]
            tokens.append((owner, np.full(len(owner), place), of_kind))
        owner, kinds, each = (np.concatenate(column) for column in zip(*tokens, strict=True))
        # By request, then in the order of the kinds.
        order = np.lexsort((kinds, owner))
        self._counts.extend(counts.sum(axis=1))
        self._kind.extend(kinds[order])
        self._tokens.extend(each[order])
        sums: LongArray = np.bincount(owner, weights=each, minlength=n).astype(np.int64)
        return sums

    def finish(self) -> tuple[LongArray, LongArray, LongArray]:
        """Items by request, and kind and tokens of each."""
        return self._counts.finish(), self._kind.finish(), self._tokens.finish()
