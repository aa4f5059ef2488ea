"""What is admitted, what is refused, and what it costs."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.engine_bridge.admission.rig import CHAT, PLAN, Clock, Rig, asked, now, settings
from tests.engine_bridge.admission.test_media import png
from trimtab.engine_bridge.admission.asked import Asked
from trimtab.engine_bridge.admission.bill import LEASE_S
from trimtab.engine_bridge.admission.core import EngineLoad
from trimtab.engine_bridge.admission.outcome import Outcome
from trimtab.engine_bridge.admission.prefill import prefill_ms
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.media import IMAGE
from trimtab.engine_bridge.plan import with_values


class Counting:
    """A tokenizer that says what the test says, and how often it was asked."""

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens
        self.bodies: list[object] = []

    async def count(self, asked: Asked) -> int | None:
        self.bodies.append(asked.body)
        return self.tokens


class Failing:
    async def count(self, asked: Asked) -> int | None:
        raise OSError("no engine there")


def long_prompt(tokens: int) -> str:
    return "word" * tokens


def test_without_limits_everything_passes_and_nothing_is_counted() -> None:
    rig = Rig(settings())
    assert not [rig.ticket().changes for _ in range(1000) if rig.ticket().changes]
    assert len(rig.ledger) == 0


def test_requests_a_minute() -> None:
    rig = Rig(settings(T0={"requests_per_minute": 3}))
    for _ in range(3):
        rig.ticket()
    refused = rig.refusal()
    assert (refused.status, refused.code) == (429, "requests_quota")
    assert refused.retry_after_s is not None
    rig.ticket("other")
    rig.clock.s += refused.retry_after_s
    rig.ticket()


def test_requests_a_second_stop_a_burst_that_the_minute_would_let_through() -> None:
    rig = Rig(settings(T0={"requests_per_second": 3, "requests_per_minute": 100}))
    for _ in range(4):
        for _ in range(3):
            rig.ticket()
        refused = rig.refusal()
        assert (refused.status, refused.code) == (429, "requests_quota")
        assert refused.retry_after_s is not None
        assert 0.9 < refused.retry_after_s <= 1.02
        rig.clock.s += refused.retry_after_s


def test_a_tier_without_limits_of_its_own_has_none_and_a_tenants_own_go_first() -> None:
    rules = settings(
        T0={"requests_per_minute": 1, "max_prompt_tokens": 1000},
        tenants={"big": {"requests_per_minute": None}, "small": {"max_prompt_tokens": 100}},
    )
    rig = Rig(rules)
    for _ in range(5):
        rig.ticket(tier="T1")
        rig.ticket("big")
    assert rig.refusal("big", prompt="x" * 20_000).status == 413
    rig.ticket("small")
    assert rig.refusal("small", prompt=long_prompt(150)).status == 413


def test_several_prompts_and_answers_count_as_so_many_requests() -> None:
    rig = Rig(settings(T0={"requests_per_minute": 6}))
    rig.ticket(prompt=["a", "b"], n=3)
    assert rig.refusal().code == "requests_quota"
    fresh = Rig(settings(T0={"requests_per_minute": 6}))
    assert fresh.refusal(n=7).code == "over_quota_for_good"
    assert fresh.refusal(prompt=["a"] * 7).retry_after_s is None
    fresh.ticket(prompt=[1, 2, 3, 4, 5, 6, 7, 8])


def test_output_is_reserved_at_its_most_and_trued_up() -> None:
    rig = Rig(settings(T0={"output_tokens_per_minute": 1000}))
    first = rig.ticket(max_tokens=900)
    assert rig.refusal(max_tokens=200).code == "output_tokens_quota"
    now(first.finished(outcome=Outcome.FINISHED, prompt_tokens=2, output_tokens=100))
    rig.ticket(max_tokens=900)
    assert rig.refusal(max_tokens=1).code == "output_tokens_quota"


def test_what_is_given_back_late_leaves_the_window_as_if_it_had_never_been_there() -> None:
    rig = Rig(settings(T0={"output_tokens_per_minute": 1000}))
    first = rig.ticket(max_tokens=900)
    rig.clock.s += 30
    rig.ticket(max_tokens=100)
    now(first.finished(outcome=Outcome.FINISHED, prompt_tokens=2, output_tokens=200))
    rig.ticket(max_tokens=700)
    rig.clock.s += 31
    assert rig.refusal(max_tokens=201).code == "output_tokens_quota"
    rig.ticket(max_tokens=200)
    rig.clock.s += 60
    now(first.finished(outcome=Outcome.FINISHED, output_tokens=0))
    rig.ticket(max_tokens=800)
    assert rig.refusal(max_tokens=1).code == "output_tokens_quota"


def test_what_was_used_beyond_the_reservation_is_charged() -> None:
    rig = Rig(settings(T0={"output_tokens_per_minute": 1000}))
    ticket = rig.ticket(path=CHAT)
    assert ticket.output_tokens == PLAN.prediction.initial_output_tokens
    now(ticket.finished(outcome=Outcome.FINISHED, prompt_tokens=2, output_tokens=1500))
    assert rig.refusal(max_tokens=1).code == "output_tokens_quota"


def test_without_a_bound_the_tenants_own_past_says_how_long_an_answer_gets() -> None:
    rig = Rig(settings(T0={"output_tokens_per_minute": 100_000}))
    for length in range(1, 21):
        ticket = rig.ticket(path=CHAT)
        now(ticket.finished(outcome=Outcome.FINISHED, prompt_tokens=2, output_tokens=length))
    assert rig.ticket(path=CHAT).output_tokens == 18
    assert rig.ticket("other", path=CHAT).output_tokens == PLAN.prediction.initial_output_tokens


def test_a_request_that_no_quota_could_hold_is_told_so() -> None:
    rig = Rig(settings(T0={"output_tokens_per_minute": 1000, "prompt_tokens_per_minute": 50}))
    refused = rig.refusal(max_tokens=1001)
    assert (refused.status, refused.retry_after_s) == (413, None)
    assert "1001 output tokens" in refused.message
    assert rig.refusal(prompt="x" * 2000).code == "over_quota_for_good"


@pytest.mark.parametrize("outcome", [Outcome.INVALID, Outcome.REFUSED])
def test_what_the_engine_has_not_worked_on_takes_a_request_and_no_tokens(outcome: Outcome) -> None:
    limits = {
        "requests_per_minute": 2,
        "prompt_tokens_per_minute": 500,
        "output_tokens_per_minute": 100,
    }
    rig = Rig(settings(T0=limits))
    now(rig.ticket(max_tokens=100).finished(outcome=outcome))
    rig.ticket(max_tokens=100)
    assert rig.refusal(max_tokens=0).code == "requests_quota"


def test_what_no_engine_took_costs_nothing() -> None:
    rig = Rig(settings(T0={"requests_per_minute": 1}))
    for _ in range(5):
        now(rig.ticket().finished(outcome=Outcome.UNREACHABLE))


def test_places_come_back_once_and_only_once() -> None:
    rig = Rig(settings(T0={"concurrent_requests": 2}))
    first, second = rig.ticket(), rig.ticket()
    refused = rig.refusal()
    assert (refused.status, refused.code) == (429, "concurrency")
    for _ in range(3):
        now(first.finished(outcome=Outcome.FINISHED))
    third = rig.ticket()
    assert rig.refusal().code == "concurrency"
    for ticket in (second, third):
        now(ticket.finished(outcome=Outcome.CANCELLED))
    rig.ticket(n=2)
    assert rig.refusal().code == "concurrency"


def test_a_ticket_that_ends_twice_takes_nothing_from_the_others() -> None:
    rig = Rig(settings(T0={"output_tokens_per_minute": 1000, "requests_per_minute": 3}))
    first, _ = rig.ticket(max_tokens=500), rig.ticket(max_tokens=500)
    for _ in range(3):
        now(first.finished(outcome=Outcome.UNREACHABLE))
    rig.ticket(max_tokens=500)
    assert rig.refusal(max_tokens=1).code == "output_tokens_quota"
    rig.ticket(max_tokens=0)
    assert rig.refusal(max_tokens=0).code == "requests_quota"


def test_a_lost_ticket_runs_out_and_one_that_is_held_does_not() -> None:
    rig = Rig(settings(T0={"concurrent_requests": 3}))
    held = [rig.ticket(), rig.ticket()]
    rig.ticket()  # lost at once
    for _ in range(12):
        rig.clock.s += LEASE_S / 3
        now(rig.admission.renew())
    held.append(rig.ticket())
    assert rig.refusal().code == "concurrency"
    assert all(one.is_open for one in held)


def test_a_request_that_lasts_too_long_no_longer_counts() -> None:
    rig = Rig(settings(T0={"concurrent_requests": 1}, longest_request_s=100.0))
    held = rig.ticket()
    for _ in range(9):
        rig.clock.s += LEASE_S / 3
        now(rig.admission.renew())
    second = rig.ticket()
    now(held.finished(outcome=Outcome.FINISHED))
    assert rig.refusal().code == "concurrency"
    assert second.is_open


def test_a_prompt_within_the_bound_in_bytes_is_never_counted() -> None:
    counter = Counting(10**9)
    rig = Rig(settings(T0={"max_prompt_tokens": 2000}), more={"counter": counter})
    rig.ticket(prompt="x" * 1500)
    assert not counter.bodies


@pytest.mark.parametrize(("tokens", "status"), [(2000, None), (2001, 413)])
def test_above_it_the_tokenizer_decides(tokens: int, status: int | None) -> None:
    counter = Counting(tokens)
    rig = Rig(settings(T0={"max_prompt_tokens": 2000}), more={"counter": counter})
    if status is None:
        assert rig.ticket(prompt="x" * 8000).prompt_tokens == tokens
    else:
        refused = rig.refusal(prompt="x" * 8000)
        assert (refused.status, refused.code) == (status, "prompt_too_long")
    assert len(counter.bodies) == 1


def test_a_body_that_no_tokenizer_could_shrink_enough_is_not_counted() -> None:
    counter = Counting(1)
    rig = Rig(settings(T0={"max_prompt_tokens": 2000}), more={"counter": counter})
    assert rig.refusal(prompt="x" * 40_000).status == 413
    # However few tokens the tenant's last prompts had for their bytes.
    for _ in range(3):
        now(rig.ticket(prompt="x" * 1000).finished(outcome=Outcome.FINISHED, prompt_tokens=1))
    assert rig.refusal(prompt="x" * 40_000).status == 413
    assert not counter.bodies


def test_where_nobody_can_count_a_typical_prompt_decides() -> None:
    rig = Rig(settings(T0={"max_prompt_tokens": 2000}), more={"counter": Failing()})
    rig.ticket(prompt="x" * 7000)
    assert rig.refusal(prompt="x" * 9000).code == "prompt_too_long"


def test_batch_is_judged_by_the_time_of_its_prefill() -> None:
    engine = get_engine_spec("h100:llama-3.1-70b-tp4")
    plan = with_values(PLAN, {"tiers.T2.targets.e2e_ms": 10_000})
    rig = Rig(settings(), plan=plan, more={"engine": engine})
    rig.ticket(tier="T2", prompt="x" * 80_000)
    refused = rig.refusal(tier="T2", prompt="x" * 2_000_000)
    assert (refused.status, refused.code) == (413, "prefill_too_long")
    rig.ticket(tier="T0", prompt="x" * 2_000_000)
    off = Rig(settings(T2={"max_prefill_ms": None}), plan=plan, more={"engine": engine})
    off.ticket(tier="T2", prompt="x" * 2_000_000)


def test_encoding_what_is_shown_takes_from_the_time_of_the_prefill() -> None:
    engine = get_engine_spec("h100:qwen2.5-vl-7b-tp1")
    assert engine.encoder is not None
    picture = base64.b64encode(png(1024, 1024)).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}

    def shown(times: int, words: int) -> dict[str, Any]:
        content = [{"type": "text", "text": "x" * words}, *[part] * times]
        return {"path": CHAT, "messages": [{"role": "user", "content": content}]}

    # 4 tiles of 256 tokens each: some 13 ms of encoding and 20 ms of reading apiece.
    each_ms = engine.encoder.item_ms(IMAGE, 1024)
    read_ms = prefill_ms(engine, 20 * 1024 + 1000)
    rules = settings(T0={"max_prefill_ms": read_ms + 10 * each_ms})
    rig = Rig(rules, more={"engine": engine, "counter": Counting(500)})
    refused = rig.refusal(**shown(20, 500))
    assert (refused.status, refused.code) == (413, "prefill_too_long")
    # The same prompt with its images encoded elsewhere, or on an engine that has no encoder.
    embeds = {"type": "image_embeds", "image_embeds": picture}
    content = [{"type": "text", "text": "x" * 500}, *[embeds] * 5]
    rig.ticket(path=CHAT, messages=[{"role": "user", "content": content}])
    plain = Rig(rules, more={"engine": replace(engine, encoder=None), "counter": Counting(500)})
    plain.ticket(**shown(20, 500))
    rig.ticket(**shown(12, 500))


def test_encoding_alone_may_take_too_long() -> None:
    engine = get_engine_spec("h100:qwen2.5-vl-7b-tp1")
    rig = Rig(settings(T0={"max_prefill_ms": 30}), more={"engine": engine})
    rig.ticket(prompt="x" * 300)
    video = {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}
    refused = rig.refusal(path=CHAT, messages=[{"role": "user", "content": [video]}])
    assert refused.code == "prefill_too_long"


def test_a_quota_counts_what_is_shown() -> None:
    rig = Rig(settings(T0={"prompt_tokens_per_minute": 1000}))
    picture = base64.b64encode(png(512, 512)).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    ask = {"path": CHAT, "messages": [{"role": "user", "content": [part]}]}
    first = rig.ticket(**ask)
    assert first.prompt_tokens >= 256
    rig.ticket(**ask)
    assert rig.refusal(**ask).code == "prompt_tokens_quota"
    # The engine has counted fewer: what was taken too much comes back.
    now(first.finished(outcome=Outcome.FINISHED, prompt_tokens=20, output_tokens=1))
    rig.ticket(**ask)


def test_a_large_part_of_a_quota_is_counted_before_it_is_charged() -> None:
    counter = Counting(300)
    rig = Rig(settings(T0={"prompt_tokens_per_minute": 1000}), more={"counter": counter})
    for _ in range(3):
        assert rig.ticket(prompt="x" * 1500).prompt_tokens == 300
    assert rig.refusal(prompt="x" * 1500).code == "prompt_tokens_quota"


def test_images_cost_their_tiles_and_their_bytes_are_no_text() -> None:
    counter = Counting(12)
    rig = Rig(settings(T0={"max_prompt_tokens": 1000}), more={"counter": counter})
    url = "data:image/png;base64," + "A" * 100_000
    part = {"type": "image_url", "image_url": {"url": url}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is it"}, part]}]
    assert rig.refusal(path=CHAT, messages=messages).status == 413  # 16 tiles of 256
    room = Rig(settings(T0={"max_prompt_tokens": 5000}), more={"counter": counter})
    assert room.ticket(path=CHAT, messages=messages).prompt_tokens >= 4096
    assert all("base64" not in json.dumps(body) for body in counter.bodies)


def test_max_tokens_is_cut_and_filled_in() -> None:
    rig = Rig(settings(T0={"longest_output_tokens": 100}))
    assert rig.ticket(max_tokens=50).changes == {}
    assert rig.ticket(max_tokens=5000).changes == {"max_tokens": 100}
    assert rig.ticket().changes == {}  # a completion has 16 by itself
    assert rig.ticket(path=CHAT).changes == {"max_completion_tokens": 100}
    both = rig.ticket(path=CHAT, max_tokens=7, max_completion_tokens=700)
    assert both.changes == {"max_completion_tokens": 100}
    assert rig.ticket(path="/v1/responses").changes == {"max_output_tokens": 100}
    assert rig.ticket(path="/v1/messages", max_tokens=200).changes == {"max_tokens": 100}
    assert rig.ticket(path="/v1/embeddings", input="x", max_tokens=200).changes == {}


@pytest.mark.parametrize("wrong", [-1, 1.5, "10", True, 2**31, 10**30, [], {}])
@pytest.mark.parametrize("name", ["max_tokens", "n"])
def test_a_cost_that_cannot_be_read_is_an_error_of_the_client(name: str, wrong: object) -> None:
    refused = Rig(settings()).refusal(**{name: wrong})
    assert (refused.status, refused.code) == (400, "invalid_value")
    assert name in refused.message


def test_a_budget_in_priced_tokens_knows_that_cached_ones_are_cheap() -> None:
    rig = Rig(settings(T0={"budget_per_day": 1000}), more={"counter": Counting(400)})
    ticket = rig.ticket(prompt="x" * 1500, max_tokens=200)
    assert rig.refusal(max_tokens=1).code == "budget_spent"
    now(
        ticket.finished(
            outcome=Outcome.FINISHED, prompt_tokens=400, cached_tokens=300, output_tokens=0
        )
    )
    # 130 are spent; 400 + 3 x 156 more fit, 3 x 157 do not.
    assert rig.refusal(prompt="x" * 1500, max_tokens=157).code == "budget_spent"
    rig.ticket(prompt="x" * 1500, max_tokens=156)


def test_a_budget_in_dollars_is_the_plans_price() -> None:
    plan = with_values(PLAN, {"tiers.T0.price_per_1m_tokens": 10.0})
    rig = Rig(settings(T0={"budget_per_day": 0.01}), plan=plan, more={"counter": Counting(0)})
    rig.ticket(max_tokens=900)  # a cent buys 1,000 output tokens
    assert rig.refusal(max_tokens=101).code == "budget_spent"


def test_a_day_is_any_24_hours() -> None:
    rig = Rig(settings(T0={"budget_per_day": 1000}), more={"counter": Counting(0)})
    rig.ticket(max_tokens=300)
    rig.clock.s += 86_300
    assert rig.refusal(max_tokens=300).code == "budget_spent"
    rig.clock.s += 86_400 / 60 + 101
    rig.ticket(max_tokens=300)


def test_a_suspended_tenant() -> None:
    rig = Rig(settings(tenants={"bad": {"suspended": True}}))
    assert rig.refusal("bad").status == 403
    rig.ticket()


@pytest.mark.parametrize(
    ("load", "full"),
    [
        (None, False),
        (EngineLoad(queue_length=9, kv_use_fraction=0.89, age_s=0), False),
        (EngineLoad(queue_length=10, kv_use_fraction=0.1, age_s=0), True),
        (EngineLoad(queue_length=0, kv_use_fraction=0.9, age_s=0), True),
        (EngineLoad(queue_length=0, kv_use_fraction=0.1, age_s=31), True),
    ],
)
def test_low_tiers_give_way_to_a_full_engine(load: EngineLoad | None, full: bool) -> None:
    rules = settings(saturation={"queue_length": 10, "kv_use_fraction": 0.9})
    rig = Rig(rules, more={"load": lambda model: load})
    for tier in ("T0", "T1"):
        rig.ticket(tier=tier)
    for tier in ("T2", "T3"):
        if full:
            refused = rig.refusal(tier=tier)
            assert (refused.status, refused.code) == (503, "engine_saturated")
            assert refused.retry_after_s == 5.0
        else:
            rig.ticket(tier=tier)


def test_the_load_is_that_of_the_model_that_is_asked_for() -> None:
    full = EngineLoad(queue_length=99, kv_use_fraction=1, age_s=0)
    rules = settings(saturation={"queue_length": 10, "tiers": ["T1"]})
    rig = Rig(rules, more={"load": {"full": full}.get})
    rig.ticket(tier="T1", model="idle")
    rig.ticket(tier="T3", model="full")
    assert rig.refusal(tier="T1", model="full").status == 503


def test_other_settings_take_hold_and_what_was_counted_stays() -> None:
    rig = Rig(settings(T0={"requests_per_minute": 5}))
    for _ in range(4):
        rig.ticket()
    rig.admission.reconfigure(settings(T0={"requests_per_minute": 3}), PLAN)
    assert rig.refusal().code == "requests_quota"
    rig.admission.reconfigure(settings(T0={"requests_per_minute": 6}), PLAN)
    rig.ticket()
    rig.ticket()
    assert rig.refusal().code == "requests_quota"


def test_idle_tenants_are_forgotten() -> None:
    rig = Rig(settings(T3={"requests_per_minute": 5, "concurrent_requests": 5}))
    for number in range(3000):
        now(rig.ticket(f"t{number}", tier="T3").finished(outcome=Outcome.FINISHED))
        rig.clock.s += 1
    assert len(rig.ledger) < 200


def test_decisions_and_ends_are_told() -> None:
    told: list[tuple[object, ...]] = []

    class Told:
        def decided(self, tier: str, code: str) -> None:
            told.append((tier, code))

        def ended(self, tier: str, used: object) -> None:
            told.append((tier, "ended"))

    rig = Rig(settings(T0={"requests_per_minute": 1}), more={"observer": Told()})
    ticket = rig.ticket()
    rig.refusal()
    now(ticket.finished(outcome=Outcome.FINISHED))
    now(ticket.finished(outcome=Outcome.FINISHED))
    assert told == [("T0", "admitted"), ("T0", "requests_quota"), ("T0", "ended")]


def test_a_refusal_has_openais_form() -> None:
    rig = Rig(settings(T0={"requests_per_minute": 1}), Clock(5.0))
    rig.ticket()
    refused = rig.refusal()
    error = json.loads(refused.body())["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "requests_quota")
    headers = dict(refused.headers())
    assert headers[b"retry-after"] == b"61"
    assert headers[b"retry-after-ms"] == b"61000"


def test_the_body_is_not_touched() -> None:
    rig = Rig(settings(T0={"longest_output_tokens": 1}))
    request = asked(max_tokens=5)
    before = json.dumps(request.body)
    now(rig.admission.admit(request))
    assert json.dumps(request.body) == before
