"""Admission inside a real vLLM server, as OpenAI's own client meets it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end import hostile
from tests.vllm_server import KEYS, Server, own_faults, running
from tests.waiting import poll

openai = pytest.importorskip("openai", reason="it comes with vLLM")
httpx = pytest.importorskip("httpx", reason="it comes with vLLM")

pytestmark = pytest.mark.slow
WORD = "bako "
ADMISSION = """
tiers:
  T0:
    output_tokens_per_minute: 1000
    max_prompt_tokens: 600
    longest_output_tokens: 400
  T2: {longest_output_tokens: 4, concurrent_requests: 4}
  T3: {requests_per_minute: 4, concurrent_requests: 2}
saturation: {queue_length: 1000, kv_use_fraction: 0.99}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("admission")
    (folder / "admission.yaml").write_text(ADMISSION)
    limits = str(folder / "admission.yaml")
    with running(folder, "--admission", limits, odd_requests=True) as started:
        yield started


def client(server: Server, tenant: str) -> Any:
    key = KEYS[tenant][0] if tenant in KEYS else tenant
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=120)


def chat(server: Server, tenant: str, *, words: int = 8, **fields: Any) -> Any:
    messages = [{"role": "user", "content": WORD * words}]
    created = client(server, tenant).chat.completions.create
    return created(model=server.model, messages=messages, **{"max_tokens": 8, **fields})


def metric(server: Server, name: str, label: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    found = [line for line in lines if re.match(rf"trimtab_{name}[ {{]", line) and label in line]
    assert found, f"no trimtab_{name} {label}"
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_an_unknown_key_is_an_authentication_error(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        chat(server, "sk-nobody")
    assert caught.value.code == "invalid_api_key"


def test_a_prompt_above_the_tiers_length_never_reaches_the_engine(server: Server) -> None:
    chat(server, "acme", words=500)  # over the bound in bytes, under it in tokens
    before = metric(server, "arrivals_total", 'tier="T0"')
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            chat(server, "acme", words=700, stream=stream)
        assert (caught.value.status_code, caught.value.code) == (413, "prompt_too_long")
        assert "600 tokens" in caught.value.message
    time.sleep(1.5)  # three intervals, for what would have arrived to be told
    assert metric(server, "arrivals_total", 'tier="T0"') <= before + 1
    assert metric(server, "admission_requests_total", 'code="prompt_too_long"') == 2


def test_a_stream_ends_with_usage_only_if_its_client_wants_it(server: Server) -> None:
    plain = list(chat(server, "acme", stream=True, max_tokens=5))
    assert all(chunk.choices for chunk in plain)
    assert not any(chunk.usage for chunk in plain)
    asked = list(chat(server, "acme", stream=True, stream_options={"include_usage": True}))
    assert asked[-1].usage.completion_tokens == 8
    completions = client(server, "acme").completions.create
    pieces = list(completions(model=server.model, prompt=WORD, max_tokens=5, stream=True))
    assert all(piece.choices for piece in pieces)


def test_answers_are_cut_to_the_tiers_length(server: Server) -> None:
    answer = chat(server, "acme", max_tokens=None)
    assert answer.usage.completion_tokens == 400
    assert answer.choices[0].finish_reason == "length"


def test_reservations_are_trued_up_and_the_quota_holds(server: Server) -> None:
    for stream in (False, True) * 3:
        # Six times 400 are reserved of 1,000, and a word or two are used.
        answer = chat(server, "bolt", max_tokens=400, stop=[" "], stream=stream)
        if stream:
            assert list(answer)
    chat(server, "bolt", max_tokens=400)
    chat(server, "bolt", max_tokens=400)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            chat(server, "bolt", max_tokens=400, stream=stream)
        assert caught.value.code == "output_tokens_quota"
        headers = caught.value.response.headers
        assert 0 < int(headers["retry-after"]) <= 61
        assert 0 < int(headers["retry-after-ms"]) <= 61_000
    chat(server, "bolt", max_tokens=50)


def test_requests_a_minute_and_at_once(server: Server) -> None:
    streams = [chat(server, "crowd", stream=True, max_tokens=3000) for _ in range(2)]
    with pytest.raises(openai.RateLimitError) as caught:
        chat(server, "crowd")
    assert caught.value.code == "concurrency"
    for stream in streams:
        next(iter(stream))
        stream.close()
    cancelled = 'outcome="cancelled"'
    poll(
        lambda: metric(server, "admission_ended_total", cancelled) == 2,
        what="the places of who left",
    )
    for _ in range(2):
        chat(server, "crowd")
    with pytest.raises(openai.RateLimitError) as caught:
        chat(server, "crowd")
    assert caught.value.code == "requests_quota"
    retry_ms = int(caught.value.response.headers["retry-after-ms"])
    assert 0 < retry_ms <= 61_000


def test_every_other_door_counts_as_well(server: Server) -> None:
    # crowd has used its minute up above; each of these is one more request.
    opened = client(server, "crowd")
    with pytest.raises(openai.RateLimitError):
        opened.responses.create(model=server.model, input=WORD)
    headers = {"x-api-key": KEYS["crowd"][0]}
    body = {"model": server.model, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, headers=headers, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "requests_quota")
    messages = client(server, "acme").responses.create(
        model=server.model, input=WORD * 4, max_output_tokens=5
    )
    assert messages.usage.output_tokens == 5


def test_odd_bodies_reach_the_engine_labelled_or_not_at_all(server: Server) -> None:
    """Each claims to be T1's; who asks is T2's."""

    def arrived(tier: str) -> float:
        return metric(server, "arrivals_total", f'tier="{tier}"')

    # What came before is counted at the end of its interval: let two of them pass.
    shown_s = metric(server, "engine_time_seconds", "")
    poll(
        lambda: metric(server, "engine_time_seconds", "") > shown_s + 1.0,
        what="two intervals end",
    )
    before = {tier: arrived(tier) for tier in ("T0", "T1", "T2", "T3")}
    engines_own = []
    with httpx.Client(base_url=server.url, timeout=60) as opened:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
            for body, headers in hostile.fixed_bodies(server.model, large=False):
                sent = server.bearer("odd") | headers
                encoded = {name: value.encode("latin-1") for name, value in sent.items()}
                answer = opened.post(path, content=body, headers=encoded)
                if hostile.harmless(answer.status_code, answer.content):
                    engines_own.append((path, body[:200], answer.text))
    poll(lambda: arrived("T2") > before["T2"] + 20, what="they arrive as T2's")
    assert all(arrived(tier) == before[tier] for tier in ("T0", "T1", "T3"))
    assert not engines_own, engines_own


def test_nothing_is_left_open_and_nothing_has_failed(server: Server) -> None:
    opened = "admission_open_requests"
    poll(lambda: metric(server, opened, "") == 0, what="the end of all requests")
    assert metric(server, "admission_slowed_tenants", "") == 0
    log = server.log.read_text(errors="replace")
    assert not re.search(r"never awaited|Task was destroyed", log)
    assert not own_faults(server.log)
