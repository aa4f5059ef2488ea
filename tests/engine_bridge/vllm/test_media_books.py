"""The books of media: places and numbers that are used again, vLLM's encoder cache in the state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="its encoder cache is read")

from trimtab.engine_bridge.vllm import virtual_time  # noqa: F401  isort: skip (no GPU)
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from trimtab.engine_bridge.encoder_spec import EncoderSpec
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.replay.layout import FINISHED
from trimtab.engine_bridge.vllm.flying import FlyingStep
from trimtab.engine_bridge.vllm.ledger import Ledger
from trimtab.engine_bridge.vllm.media_books import MediaBooks

COSTS = EncoderSpec(kinds=((2.0, 10.0, 0.0), (0.0, 30.0, 0.0), (0.0, 0.0, 0.0)))


class Request:
    """As much of vLLM's as the books and its encoder cache look at."""

    def __init__(self, name: str, *items: tuple[str, int, int], modality: str = "image") -> None:
        """Items are identifier, offset and length."""
        self.request_id = name
        self.mm_features = [
            MultiModalFeatureSpec(None, modality, what, PlaceholderRange(offset=at, length=tokens))
            for what, at, tokens in items
        ]

    def get_num_encoder_embeds(self, at: int) -> int:
        return int(self.mm_features[at].mm_position.get_num_embeds())


class Desk:
    """A ledger with its books of media and a stand-in for vLLM's scheduler."""

    def __init__(self, *, ahead: int = 0) -> None:
        spec = get_engine_spec("h100:llama-3.1-8b-tp1")
        self.ledger = Ledger(load_plan(), spec, blocks=1000, max_num_seqs=8, accounts=4)
        self.engine = SimpleNamespace(
            encoder_cache_manager=EncoderCacheManager(300),
            max_num_encoder_input_tokens=200,
            num_prefill_lookahead=ahead,
            requests={},
        )
        self.books = MediaBooks(self.ledger, self.engine, COSTS)

    def arrive(self, request: Request) -> int:
        self.engine.requests[request.request_id] = request
        return self.ledger.arrive(
            request.request_id,
            tenant="a",
            tier=0,
            prompt_tokens=1000,
            arrived_s=0.0,
            found_blocks=0,
            media=self.books.enter(request),
        )

    def end(self, request: Request) -> None:
        self.ledger.end(request.request_id, FINISHED, 1)
        self.books.leave(request.request_id)
        del self.engine.requests[request.request_id]

    def items(self, row: int) -> list[tuple[int, int, float, int]]:
        """Start, end, milliseconds and content of a row's items."""
        state = self.ledger.state
        r = state.req[row]
        places = slice(r.media_first, r.media_first + r.media_count)
        names = ("item_start", "item_end", "item_ms", "item_content")
        return list(zip(*(getattr(state, name)[places].tolist() for name in names), strict=True))


def test_items_are_noted_with_what_they_cost() -> None:
    desk = Desk()
    row = desk.arrive(Request("a", ("cat", 5, 100), ("dog", 105, 50)))
    other = desk.arrive(Request("b", ("cat", 0, 100)))
    heard = desk.arrive(Request("c", ("purr", 9, 100), modality="audio"))
    (start, end, ms, cat), (_, _, _, dog) = desk.items(row)
    assert (start, end) == (5, 105)
    assert ms == pytest.approx(3.0, abs=1e-5)
    assert cat != dog
    assert desk.items(other)[0][3] == cat
    assert desk.items(heard)[0][2] == pytest.approx(3.0, abs=1e-5)
    assert desk.ledger.facts(desk.arrive(Request("d"))).media_count == 0


def test_a_drafter_that_reads_ahead_needs_an_item_earlier() -> None:
    desk = Desk(ahead=1)
    assert [
        item[:2] for item in desk.items(desk.arrive(Request("a", ("x", 0, 9), ("y", 20, 9))))
    ] == [
        (0, 9),
        (19, 29),
    ]


def test_a_drafter_that_reads_ahead_keeps_no_item_waiting_for_ever() -> None:
    """Neither one as large as all that vLLM encodes, nor one that only the end of another frees."""
    desk = Desk(ahead=3)
    row = desk.arrive(Request("a", ("x", 5, 200), ("y", 206, 200)))
    desk.books.show()
    (first, second), e = desk.items(row), desk.ledger.state.engine[0]
    assert e.encoder_budget >= second[1] - second[0]
    assert e.encoder_budget >= first[1] - first[0]
    assert second[0] >= first[1]


def test_places_and_numbers_are_used_again_for_as_long_as_the_engine_runs() -> None:
    desk, rng = Desk(), np.random.default_rng(5)
    alive: list[tuple[Request, int, list[Any]]] = []
    for number in range(3000):
        count = int(rng.integers(0, 5))
        what = rng.integers(0, 10**6 if rng.random() < 0.5 else 8, count)
        request = Request(
            str(number), *((f"{w}", 30 * at, 1 + int(w) % 29) for at, w in enumerate(what))
        )
        row = desk.arrive(request)
        alive.append((request, row, [item[:3] for item in desk.items(row)]))
        if len(alive) > 40:
            ended, _, _ = alive.pop(int(rng.integers(len(alive))))
            desk.end(ended)
        if number % 500 == 0:
            desk.ledger.close_interval(0.0, 0.0)
    shown: dict[str, set[int]] = {}
    for request, row, noted in alive:
        assert [item[:3] for item in desk.items(row)] == noted
        for feature, item in zip(request.mm_features, desk.items(row), strict=True):
            shown.setdefault(feature.identifier, set()).add(item[3])
    # Equal ones have one number, others another.
    assert all(len(numbers) == 1 for numbers in shown.values())
    assert len({min(numbers) for numbers in shown.values()}) == len(shown)
    state = desk.ledger.state
    assert len(state.item_start) < 1000
    assert len(state.encoded) < 1000
    for request, _, _ in alive:
        desk.end(request)
    assert not desk.books._items
    assert not desk.books._number


def test_the_plan_sees_what_vllm_holds_encoded() -> None:
    desk = Desk()
    first, second = Request("a", ("cat", 0, 100)), Request("b", ("dog", 0, 80), ("cat", 90, 100))
    desk.arrive(first)
    row = desk.arrive(second)
    manager = desk.engine.encoder_cache_manager
    for request in (first, Request("gone", ("bird", 0, 60))):
        assert manager.can_allocate(request, 0, 200, 0)
        manager.allocate(request, 0)
    desk.books.show()
    state, (dog, cat) = desk.ledger.state, [item[3] for item in desk.items(row)]
    assert (state.encoded[cat].cached, state.encoded[cat].refs) == (1, 1)
    assert state.encoded[dog].cached == 0
    e = state.engine[0]
    assert (e.encoder_budget, e.encoder_free, e.encoder_freeable) == (200, 140, 140)
    manager.free(first)
    desk.books.show()
    assert (state.encoded[cat].cached, state.encoded[cat].refs) == (1, 0)
    assert e.encoder_freeable == 240
    # What the plan counts on is held, only where it lies in the chunk.
    desk.books.hold(second, 0, 90)
    assert not manager.cached["cat"]
    desk.books.hold(second, 80, 20)
    assert manager.cached["cat"] == {"b"}
    desk.books.withdraw(second)
    assert not manager.cached["cat"]


def test_places_that_no_encoder_fills_never_keep_an_item_out() -> None:
    import torch

    desk = Desk()
    request = Request("a", ("map", 0, 220))
    mask = torch.ones(220, dtype=torch.bool)
    mask[::10] = False
    place = PlaceholderRange(offset=0, length=220, is_embed=mask)
    request.mm_features[0] = MultiModalFeatureSpec(None, "image", "map", place)
    desk.arrive(request)
    assert desk.engine.encoder_cache_manager.can_allocate(request, 0, 200, 0)
    desk.books.show()
    e = desk.ledger.state.engine[0]
    assert e.encoder_budget >= 220
    # More than vLLM has room for it never promises: vLLM would cut a chunk that is named already.
    place = PlaceholderRange(offset=0, length=100, is_embed=mask[:100])
    request.mm_features[0] = MultiModalFeatureSpec(None, "image", "cat", place)
    desk.engine.encoder_cache_manager.allocate(request, 0)
    desk.books.show()
    assert e.encoder_freeable == desk.engine.encoder_cache_manager.num_freeable_slots == 210


@pytest.mark.parametrize(
    ("encode_ms", "tells"),
    [(0.0, False), (2.0, True), (9.0, False)],
    ids=["unknown", "few", "most"],
)
def test_drift_is_not_learned_from_steps_that_mostly_encode(encode_ms: float, tells: bool) -> None:
    facts = [1.0, 10.0, 1.0, 50.0, 99.0, encode_ms]
    assert FlyingStep(10.0, 0.0, facts, 0.0, (1, 576, 0, 0, 0, 0)).tells_drift is tells
    assert FlyingStep(10.0, 0.0, facts, 0.0).tells_drift
