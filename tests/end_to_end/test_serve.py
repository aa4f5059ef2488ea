"""A client's view of `trimtab serve`: OpenAI's interface, identity, isolation, aborts, metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm_server import Server
from tests.waiting import poll

httpx = pytest.importorskip("httpx", reason="it comes with vLLM")

pytestmark = pytest.mark.slow
WORD = "bako "


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with httpx.Client(base_url=server.url, timeout=60) as opened:
        yield opened


def complete(
    client: Any, server: Server, tenant: str, *, headers: dict[str, str] | None = None, **body: Any
) -> Any:
    sent = {"model": server.model, "prompt": WORD * 8, "max_tokens": 4, **body}
    return client.post(
        "/v1/completions", json=sent, headers=server.bearer(tenant) | (headers or {})
    )


def counter(client: Any, name: str, label: str = "") -> float:
    lines = client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f"{name}{{") and label in line]
    assert found, f"no {name} {label}"
    return sum(float(line.rpartition(" ")[2]) for line in found)


def events(response: Any) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_completions_stream_as_many_tokens_as_were_asked_for(client: Any, server: Server) -> None:
    body = {"model": server.model, "prompt": WORD * 8, "max_tokens": 400, "stream": True}
    with client.stream(
        "POST", "/v1/completions", json=body, headers=server.bearer("acme")
    ) as response:
        assert response.status_code == 200
        choices = [event["choices"][0] for event in events(response)]
    assert len("".join(choice["text"] for choice in choices).split()) == 400
    assert choices[-1]["finish_reason"] == "length"
    # Tokens that are there together come together; all at once would be no stream.
    assert len(choices) > 3


def test_chat_streams_and_its_next_turn_finds_the_last_one_cached(
    client: Any, server: Server
) -> None:
    messages = [{"role": "user", "content": "How are you? " * 20}]
    body = {"model": server.model, "messages": messages, "max_tokens": 64, "stream": True}
    with client.stream(
        "POST", "/v1/chat/completions", json=body, headers=server.bearer("acme")
    ) as response:
        assert response.status_code == 200
        deltas = [event["choices"][0]["delta"].get("content") or "" for event in events(response)]
    answer = "".join(deltas)
    assert len(answer.split()) == 64
    before = counter(client, "vllm:prefix_cache_hits_total")
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]
    done = client.post(
        "/v1/chat/completions",
        json={"model": server.model, "messages": messages, "max_tokens": 1},
        headers=server.bearer("acme"),
    )
    prompt = done.json()["usage"]["prompt_tokens"]
    hits = counter(client, "vllm:prefix_cache_hits_total") - before
    # All but the new question and the block that was not full.
    assert prompt - 32 <= hits < prompt


def test_equal_prompts_give_equal_answers(client: Any, server: Server) -> None:
    first, again, other = (
        complete(client, server, "acme", prompt=prompt).json()["choices"][0]["text"]
        for prompt in (WORD, WORD, WORD * 2)
    )
    assert first == again != other


def test_a_client_that_leaves_takes_its_request_with_it(client: Any, server: Server) -> None:
    running = "vllm:num_requests_running"
    before = counter(client, "vllm:generation_tokens_total")
    body = {"model": server.model, "prompt": WORD, "max_tokens": 100_000, "stream": True}
    with client.stream(
        "POST", "/v1/completions", json=body, headers=server.bearer("acme")
    ) as response:
        stream = events(response)
        next(stream)
        with httpx.Client(base_url=server.url, timeout=60) as other:
            poll(lambda: counter(other, running) == 1, what="a running request")
    poll(lambda: counter(client, running) == 0, what="an idle engine")
    assert counter(client, "vllm:generation_tokens_total") - before < 100_000


def test_labels_come_from_the_key_not_from_the_client(client: Any, server: Server) -> None:
    done = complete(
        client,
        server,
        "crowd",
        vllm_xargs={"trimtab_tier": "T0", "trimtab_tenant": "acme", "mine": 1},
        priority=-7,
        cache_salt="stolen",
        request_id="mine",
        headers={
            "X-Vllm-Priority": "-7",
            "X-Request-Id": "mine",
            "X-Trimtab-Tenant": "acme",
            "X-Trimtab-Tier": "T0",
        },
    )
    assert done.status_code == 200, done.text
    request_id = done.json()["id"]
    assert "mine" not in request_id
    line = logged(server, request_id)
    assert "'trimtab_tenant': 'crowd'" in line
    assert "'trimtab_tier': 'T3'" in line
    assert "mine" not in line
    assert "acme" not in line


def logged(server: Server, request_id: str) -> str:
    """What vLLM says that it has received under this id."""
    pattern = re.compile(rf"Received request {re.escape(request_id)}\S*: .*")
    found: list[str] = []

    def there() -> bool:
        found[:] = pattern.findall(server.log.read_text(errors="replace"))
        return bool(found)

    poll(there, what=f"{request_id} in the log")
    return found[0]


def test_a_key_that_nobody_has_is_refused(client: Any, server: Server) -> None:
    body = {"model": server.model, "prompt": WORD, "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer sk-wrong"}):
        refused = client.post("/v1/completions", json=body, headers=headers)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
    assert client.get("/v1/models").status_code == 401


def test_tenants_share_no_cached_blocks(client: Any, server: Server) -> None:
    prompt = "lamu kire " * 200

    def hits_of(tenant: str) -> float:
        before = counter(client, "vllm:prefix_cache_hits_total")
        # A salt that both know must not bring them together.
        assert complete(client, server, tenant, prompt=prompt, cache_salt="x").status_code == 200
        return counter(client, "vllm:prefix_cache_hits_total") - before

    assert hits_of("acme") == 0
    assert hits_of("acme") > 0.9 * 400
    assert hits_of("bolt") == 0


def test_what_is_no_json_is_refused(client: Any, server: Server) -> None:
    headers = server.bearer("acme") | {"content-type": "application/json"}
    answer = client.post("/v1/completions", content=b"{no", headers=headers)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_paths_that_cannot_be_stamped_are_closed(client: Any, server: Server) -> None:
    answer = client.post("/inference/v1/generate", json={}, headers=server.bearer("acme"))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_served"


def test_the_engine_is_as_large_as_its_spec_says(client: Any, server: Server) -> None:
    from trimtab.engine_bridge.engine_spec import get_engine_spec

    spec = get_engine_spec("h100:llama-3.1-70b-tp8")
    label = f'num_gpu_blocks="{spec.num_gpu_blocks}"'
    assert counter(client, "vllm:cache_config_info", label) == 1
    assert counter(client, "vllm:cache_config_info", f'block_size="{spec.block_size}"') == 1
