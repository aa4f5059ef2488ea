"""The part of the ledger that media need: the items of vLLM's requests, and its encoder cache.

Items lie in the state's columns, a run of them for each request, and contents have numbers while a
request that shows them is there; both are used again. What the encoder cache holds is vLLM's to
say: it is put into the state before each plan, so that the plan decides on the truth
(`replay.encoding`). After the step what vLLM really encoded is booked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from trimtab.engine_bridge.encoder_spec import EncoderSpec
from trimtab.engine_bridge.replay.layout import NONE
from trimtab.engine_bridge.replay.records import CONTENT, records
from trimtab.engine_bridge.vllm.ledger import Ledger
from trimtab.engine_bridge.vllm.media import features_ms

_COLUMNS: Final = ("item_start", "item_end", "item_ms", "item_content")


class _Items(NamedTuple):
    """Where a request's items lie, and the numbers of what they show."""

    first: int
    contents: list[int]


class MediaBooks:
    """Books of the requests with media."""

    def __init__(self, ledger: Ledger, engine: Any, encoder: EncoderSpec | None) -> None:
        """Begin without any.

        Args:
            ledger: The books of everything else.
            engine: vLLM's scheduler: its encoder cache, its budget, its requests.
            encoder: What encoding costs; None: nothing that is known.
        """
        self._ledger, self._engine, self._encoder = ledger, engine, encoder
        # A drafter that reads ahead needs an item so many tokens earlier.
        self._ahead = int(getattr(engine, "num_prefill_lookahead", 0))
        self._items: dict[str, _Items] = {}
        self._used = 0
        """Places of the columns that are taken; those of ended requests are among them."""
        self._live = 0
        self._number: dict[str, int] = {}
        self._identifier: list[str] = []
        self._users: list[int] = []
        self._free_numbers: list[int] = []
        self._longest = 0
        """Tokens of the longest place that an item has had in the books."""

    @property
    def empty(self) -> bool:
        """Whether no request has media: then a step has nothing to do here."""
        return not self._items

    # Requests come and go.

    def enter(self, request: Any) -> tuple[int, int]:
        """Note the items of a request that arrives.

        Returns:
            Where they begin in the state's columns, and how many there are.
        """
        features = request.mm_features
        if not features:
            return 0, 0
        first = self._room_for(len(features))
        contents = [self._content(feature) for feature in features]
        state, last = self._ledger.state, first + len(features)
        starts = np.array([f.mm_position.offset for f in features])
        lengths = np.array([f.mm_position.length for f in features])
        ends = starts + lengths
        # Not before the end of the one in front: what only that end makes room for would never be
        # reached. vLLM goes on to the item itself where there is no room for it.
        earliest = np.concatenate(([0], ends[:-1]))
        state.item_start[first:last] = np.maximum(starts - self._ahead, earliest)
        state.item_end[first:last] = ends
        state.item_ms[first:last] = [features_ms(self._encoder, [f]) for f in features]
        state.item_content[first:last] = contents
        self._items[request.request_id] = _Items(first, contents)
        self._used = last
        self._live += len(features)
        state.engine[0].encoding = 1
        return first, len(features)

    def leave(self, request_id: str) -> None:
        """A request has ended."""
        items = self._items.pop(request_id, None)
        if items is None:
            return
        self._live -= len(items.contents)
        for number in items.contents:
            self._users[number] -= 1
            if self._users[number] == 0:
                del self._number[self._identifier[number]]
                self._free_numbers.append(number)

    def _content(self, feature: Any) -> int:
        """The number of what an item shows."""
        number = self._number.get(feature.identifier)
        if number is None:
            number = self._free_numbers.pop() if self._free_numbers else self._new_number()
            self._number[feature.identifier] = number
            self._identifier[number] = feature.identifier
            c = self._ledger.state.encoded[number]
            c.cached = c.refs = 0
            c.step = c.row = NONE
            c.tokens = feature.mm_position.length
            self._longest = max(self._longest, c.tokens + self._ahead)
        self._users[number] += 1
        return number

    def _new_number(self) -> int:
        number = len(self._users)
        self._users.append(0)
        self._identifier.append("")
        encoded = self._ledger.state.encoded
        if number == len(encoded):
            more = records(2 * number + 64, CONTENT)
            more[:number] = encoded
            self._ledger.replace_arrays(encoded=more)
        return number

    def _room_for(self, count: int) -> int:
        """A run of places; those of ended requests are used again when no others are left."""
        state = self._ledger.state
        if self._used + count > len(state.item_start):
            self._move_together(2 * (self._live + count) + 64)
        return self._used

    def _move_together(self, places: int) -> None:
        """Put the items that there are into new columns, one behind the other."""
        state, at = self._ledger.state, 0
        columns = {name: np.zeros(places, getattr(state, name).dtype) for name in _COLUMNS}
        for request_id, items in self._items.items():
            count = len(items.contents)
            for name, column in columns.items():
                column[at : at + count] = getattr(state, name)[items.first : items.first + count]
            row = self._ledger.row(request_id)
            if row is not None:
                r, by = state.req[row], at - items.first
                r.media_first += by
                r.media_next += by
                r.media_held += by
            self._items[request_id] = items._replace(first=at)
            at += count
        self._used = at
        self._ledger.replace_arrays(**columns)

    # A step.

    def show(self) -> None:
        """Tell the books what the encoder cache holds, and for how many; before each plan."""
        if self.empty:
            return
        manager, state = self._engine.encoder_cache_manager, self._ledger.state
        encoded, e = state.encoded, state.engine[0]
        encoded["cached"][: len(self._users)] = 0
        encoded["refs"][: len(self._users)] = 0
        known = [
            (number, len(holders))
            for identifier, holders in manager.cached.items()
            if (number := self._number.get(identifier)) is not None
        ]
        if known:
            numbers, refs = zip(*known, strict=True)
            encoded["cached"][list(numbers)] = 1
            encoded["refs"][list(numbers)] = refs
        # vLLM counts what encoders give, never more than an item's place, which the plan counts. So
        # vLLM cuts no chunk whose blocks have their names already; and alone any item may start.
        e.encoder_budget = max(self._engine.max_num_encoder_input_tokens, self._longest)
        unheld = manager.num_freeable_slots == manager.cache_size
        room = max(manager.cache_size, self._longest) - manager.cache_size if unheld else 0
        e.encoder_free = manager.num_free_slots + room
        e.encoder_freeable = manager.num_freeable_slots + room

    def hold(self, request: Any, computed_tokens: int, tokens: int) -> None:
        """Keep what the plan has found encoded for a chunk from being evicted for another request.

        vLLM lets its requests look at the cache in its own order, which is not the plan's.

        Args:
            request: Whose chunk it is.
            computed_tokens: Prompt tokens before it.
            tokens: Its length.
        """
        if not request.mm_features:
            return
        manager, end = self._engine.encoder_cache_manager, computed_tokens + tokens + self._ahead
        for at, feature in enumerate(request.mm_features):
            place = feature.mm_position
            if place.offset >= end:
                return
            if place.offset + place.length > computed_tokens:
                manager.check_and_update_cache(request, at)

    def withdraw(self, request: Any) -> None:
        """A request that was to join does not: it keeps nothing encoded."""
        if request.mm_features:
            self._engine.encoder_cache_manager.free(request)

    def settle(self, scheduled: Mapping[str, Sequence[int]], chunks: Mapping[str, int]) -> None:
        """Book what vLLM encoded in the step; whom it is booked to, the plan says if it is right.

        Args:
            scheduled: `SchedulerOutput.scheduled_encoder_inputs`.
            chunks: What vLLM really gave each prefill of the plan, tokens by request id.
        """
        if self.empty:
            return
        state, rows = self._ledger.state, {}
        for request_id in chunks:
            row = self._ledger.row(request_id) if request_id in self._items else None
            if row is not None:
                rows[request_id] = row
        really = {
            request_id: features_ms(
                self._encoder, (self._engine.requests[request_id].mm_features[at] for at in numbers)
            )
            for request_id, numbers in scheduled.items()
        }
        planned_ms = sum(float(state.req[row].encode_ms) for row in rows.values())
        agrees = planned_ms == sum(really.values())
        for request_id, row in rows.items():
            r = state.req[row]
            if not agrees:
                r.encode_ms = really.get(request_id, 0.0)
            end = r.computed + chunks[request_id]
            while r.media_held > r.media_next and state.item_start[r.media_held - 1] >= end:
                r.media_held -= 1
