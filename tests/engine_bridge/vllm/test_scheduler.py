"""Nothing is lost in the fair scheduler inside vLLM, whatever clients and a controller do to it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="runs vLLM's own scheduler")

from tests.engine_bridge.replay.workloads import TIERS, small_engine
from trimtab.engine_bridge.vllm.control_errors import ProposalError

from tests.engine_bridge.vllm.driven import Driven  # isort: skip
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

SEEDS, REQUESTS, MEDIA_SEEDS = 20, 250, 5
CHANGE_S = 0.05
ORDERS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


class Storm:
    """Random clients and a random controller around one engine."""

    def __init__(self, seed: int, asynchronous: bool, *, media: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        spec = small_engine(
            blocks=int(self.rng.integers(80, 300)),
            seqs=int(self.rng.integers(4, 17)),
            tokens=int(self.rng.choice((128, 512, 2048))),
            caching=bool(self.rng.random() < 0.7),
        )
        self.limit = (spec.num_gpu_blocks - 1) * spec.block_size
        self.pictures = np.random.default_rng([seed, 1]) if media else None
        self.sizes: list[int] = []
        encoder = None
        if self.pictures is not None:
            self.sizes = self.pictures.integers(1, 90, 30).tolist()
            # Some a step's whole budget, and little room for others beside them.
            encoder = (max(self.sizes), int(max(self.sizes) * self.pictures.uniform(1.0, 3.0)))
        self.engine = Driven(spec, asynchronous=asynchronous, encoder=encoder)
        self.engine.in_flight = self._in_flight
        self.shared = [self._words(int(self.rng.integers(20, 400))) for _ in range(6)]
        self.changes = self.refusals = self.next = 0
        self.changed_s = 0.0

    def _words(self, count: int) -> list[int]:
        return self.rng.integers(0, 30_000, count).tolist()

    def _fractions(self) -> list[float]:
        fractions = self.rng.dirichlet(np.ones(len(self.engine.scheduler._plan.pools)))
        return [float(fraction) for fraction in fractions]

    def run(self) -> None:
        engine = self.engine
        arrivals = np.cumsum(self.rng.exponential(0.02, REQUESTS)).tolist()
        while self.next < REQUESTS or engine.busy():
            while self.next < REQUESTS and arrivals[self.next] <= engine.now_s:
                self._ask()
            self._maybe_change()
            if engine.busy():
                engine.turn()
            else:
                engine.now_s = arrivals[self.next]
        engine.check_over()

    def _ask(self) -> None:
        rng = self.rng
        prompt = list(self.shared[rng.integers(6)]) if rng.random() < 0.5 else []
        prompt += self._words(int(rng.integers(1, 300)))
        output = int(min(rng.integers(1, 120), self.limit - len(prompt)))
        name = f"{self.next:05d}"
        tier, tenant = TIERS[rng.integers(4)], f"tenant-{rng.integers(5)}"
        self.engine.ask(name, prompt, output, tier, tenant, self._media(len(prompt)))
        self.next += 1

    def _media(self, prompt_tokens: int) -> list[MultiModalFeatureSpec]:
        """Items one behind the other, of contents that others show as well."""
        if self.pictures is None:
            return []
        rng, items, at = self.pictures, [], 0
        while (at := at + int(rng.integers(0, 120))) < prompt_tokens:
            content = int(rng.integers(len(self.sizes)))
            place = PlaceholderRange(offset=at, length=self.sizes[content])
            at += self.sizes[content]
            if at <= prompt_tokens:
                items.append(MultiModalFeatureSpec(None, "image", str(content), place))
        return items

    def _in_flight(self) -> None:
        if self.rng.random() < 0.05 and (names := self.engine.open_names):
            self.engine.abort(names[self.rng.integers(len(names))])

    def _maybe_change(self) -> None:
        """What a controller sends every 50 ms, one time in five nonsense."""
        engine, rng = self.engine, self.rng
        if engine.now_s < self.changed_s + CHANGE_S:
            return
        self.changed_s = engine.now_s
        values: dict[str, object] = {
            "weights": {tier: float(rng.uniform(1, 400)) for tier in TIERS},
            "prefill_budget_tokens": int(rng.integers(16, 4000)),
            "max_num_seqs": int(rng.integers(1, 20)),
            "kv_fractions": self._fractions(),
            "slack_fraction": float(rng.uniform(0, 1)),
        }
        if rng.random() < 0.2:
            values["weights"] = {"T0": float("nan")}
        store = engine.scheduler._store
        try:
            store.propose(values, holder="storm", ttl_s=float(rng.choice((0.02, 5.0))))
            self.changes += 1
        except ProposalError:
            self.refusals += 1


@ORDERS
def test_every_request_ends_once_with_its_own_tokens_and_every_block_comes_back(
    asynchronous: bool,
) -> None:
    changes = refusals = preemptions = aborted = 0
    for seed in range(SEEDS):
        storm = Storm(seed, asynchronous)
        storm.run()
        changes, refusals = changes + storm.changes, refusals + storm.refusals
        preemptions += storm.engine.preemptions
        aborted += len(storm.engine.aborted)
    # Without these it would say little.
    assert min(changes, refusals, preemptions, aborted) > 100, (
        changes,
        refusals,
        preemptions,
        aborted,
    )


@ORDERS
def test_media_are_there_when_they_are_computed_and_leave_nothing_behind(
    asynchronous: bool,
) -> None:
    encoded = preemptions = aborted = 0
    for seed in range(MEDIA_SEEDS):
        storm = Storm(seed, asynchronous, media=True)
        storm.run()
        encoded += storm.engine.encoded
        preemptions += storm.engine.preemptions
        aborted += len(storm.engine.aborted)
    assert min(encoded, preemptions, aborted) > 30, (encoded, preemptions, aborted)


@ORDERS
def test_what_vllm_refused_to_compute_is_not_found_in_the_cache(asynchronous: bool) -> None:
    engine = Driven(small_engine(blocks=200, seqs=8, tokens=512), asynchronous=asynchronous)
    engine.scheduler.lora_config = SimpleNamespace(max_loras=1)
    for number, name in enumerate(("first", "second"), start=1):
        engine.ask(name, [number] * 100, 3, "T0", "a")
        engine.asked[name].request.lora_request = LoRARequest(name, number, "nowhere")
    second = engine.asked["second"].request
    engine.turn()
    # The plan let both in; vLLM takes one adapter at a time.
    assert second.num_computed_tokens == 0
    found, tokens = engine.scheduler.kv_cache_manager.get_computed_blocks(second)[:2]
    assert (list(found.blocks[0]), tokens) == ([], 0)
    while engine.busy():
        engine.turn()
    engine.check_over()
