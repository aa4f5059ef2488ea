"""Requests through a real gateway to real engines: answers, labels, models, keys, refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

from tests.engine_bridge.gateway.gateway_parts import (
    MODEL,
    events,
    run,
    running_gateway,
    start_engine,
    texts,
)


def keys_file(folder: Path, **tenants: tuple[str, str]) -> str:
    path = folder / "keys.yaml"
    content = {
        tenant: {"tier": tier, "keys_sha256": [hashlib.sha256(key.encode()).hexdigest()]}
        for tenant, (key, tier) in tenants.items()
    }
    path.write_text(yaml.safe_dump(content))
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_an_answer_comes_as_the_engine_gave_it(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}) as gateway:
            answer = await gateway.ask("tokens=3")
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["text"] == "a0 a1 a2"
            assert answer.headers["x-engine"] == "a"
            assert "x-secret-hop" not in answer.headers
            assert "server" not in answer.headers
            stream = await gateway.stream("tokens=3")
            assert texts(stream) == "a0 a1 a2 "
        await engine.kill()

    run(test())


def test_usage_is_asked_for_and_shown_only_to_who_wants_it(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}) as gateway:
            unasked = await gateway.stream("tokens=3")
            assert not any(event.get("usage") for event in unasked)
            assert all(event["choices"] for event in unasked)
            asked = await gateway.stream("tokens=3", stream_options={"include_usage": True})
            assert asked[-1]["usage"]["completion_tokens"] == 3
            plain = await gateway.ask("tokens=3")
            assert plain.json()["usage"]["completion_tokens"] == 3
        sent = [one["body"].get("stream_options") for one in engine.engine.seen]
        assert sent == [{"include_usage": True}, {"include_usage": True}, None]
        await engine.kill()

    run(test())


def test_engines_learn_whose_it_is_from_the_gateway_alone(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        keys = keys_file(tmp_path, acme=("sk-acme", "T0"), crowd=("sk-crowd", "T3"))
        lies: dict[str, Any] = {
            "priority": -1, "cache_salt": "x", "vllm_xargs": {"trimtab_tier": "T0"},
            "request_id": "x", "kv_transfer_params": {}, "tenant": "acme", "tier": "T0",
        }  # fmt: skip
        claims = {
            "X-Trimtab-Tier": "T0", "X-Trimtab-Tenant": "acme", "X-Vllm-Priority": "-9",
            "X-Request-Id": "x", "X-Data-Parallel-Rank": "1", "Cookie": "c=1", "TE": "trailers",
            "Proxy-Authorization": "x", "X-Forwarded-For": "1.2.3.4", "Traceparent": "00-1-2-01",
        }  # fmt: skip
        async with running_gateway(tmp_path, {"a": engine.url}, keys=keys) as gateway:
            answer = await gateway.ask("hi", headers={**bearer("sk-crowd"), **claims}, **lies)
            assert answer.status_code == 200
        (seen,) = engine.engine.seen
        assert seen["headers"]["x-trimtab-tenant"] == "crowd"
        assert seen["headers"]["x-trimtab-tier"] == "T3"
        assert set(seen["headers"]) == {
            "host", "accept", "accept-encoding", "content-length", "content-type", "traceparent",
            "user-agent", "x-trimtab-tenant", "x-trimtab-tier",
        }  # fmt: skip
        assert seen["body"] == {"model": MODEL, "prompt": "hi"}
        await engine.kill()

    run(test())


def test_the_gateway_shows_its_own_key_to_engines(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRIMTAB_ENGINE_KEY", "sk-gateway")

    async def test() -> None:
        engine = await start_engine("a")
        keys = keys_file(tmp_path, acme=("sk-acme", "T0"))
        async with running_gateway(tmp_path, {"a": engine.url}, keys=keys) as gateway:
            await gateway.ask("hi", headers=bearer("sk-acme"))
        assert engine.engine.seen[0]["headers"]["authorization"] == "Bearer sk-gateway"
        await engine.kill()

    run(test())


def test_unknown_keys_get_401_before_an_engine_is_asked(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        keys = keys_file(tmp_path, acme=("sk-acme", "T0"))
        async with running_gateway(tmp_path, {"a": engine.url}, keys=keys) as gateway:
            for headers in ({}, bearer("sk-wrong"), {"Authorization": "Basic sk-acme"}):
                answer = await gateway.ask("hi", headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            good = await gateway.ask("hi", headers={"x-api-key": "sk-acme"})
            assert good.status_code == 200
            assert (await gateway.client.get("/v1/models")).status_code == 401
        assert engine.engine.begun == 1
        await engine.kill()

    run(test())


def test_models_are_those_that_the_tenant_can_reach(tmp_path: Path) -> None:
    async def test() -> None:
        engine, own = await start_engine("a"), await start_engine("b")
        keys = keys_file(tmp_path, acme=("sk-acme", "T0"), crowd=("sk-crowd", "T3"))
        engines = {
            "a": {"url": engine.url, "models": ["m", "n"]},
            "b": {"url": own.url, "models": ["secret"], "tenants": ["acme"]},
        }
        async with running_gateway(tmp_path, engines, keys=keys) as gateway:
            for key, names in (("sk-acme", ["secret"]), ("sk-crowd", ["m", "n"])):
                answer = await gateway.client.get("/v1/models", headers=bearer(key))
                assert [card["id"] for card in answer.json()["data"]] == names
            one = await gateway.client.get("/v1/models/n", headers=bearer("sk-crowd"))
            assert one.json()["id"] == "n"
            hidden = await gateway.client.get("/v1/models/secret", headers=bearer("sk-crowd"))
            assert hidden.status_code == 404
            refused = await gateway.ask("hi", headers=bearer("sk-crowd"), model="secret")
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "model_not_found"
        assert own.engine.begun == 0
        await engine.kill()
        await own.kill()

    run(test())


def test_what_is_no_request_is_refused_in_openais_form(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}) as gateway:
            post, get = gateway.client.post, gateway.client.get
            answers = [
                (await post("/v1/completions", content=b"{nope"), 400, "invalid_json"),
                (await post("/v1/completions", content=b"[" * 100_000), 400, "invalid_json"),
                (await post("/v1/completions", content=b"[1]"), 400, "invalid_json"),
                (await post("/v1/completions", content=b"\xff"), 400, "invalid_json"),
                (await post("/v1/completions", content=b""), 400, "invalid_json"),
                (await post("/v1/completions", json={"prompt": "x"}), 400, "model_not_found"),
                (await post("/v1/completions", json={"model": 7}), 400, "model_not_found"),
                (await post("/v1/completions", json={"model": "q"}), 404, "model_not_found"),
                (await get("/v1/completions"), 405, "method_not_allowed"),
                (await post("/v1/models"), 405, "method_not_allowed"),
                (await post("/v1/audio/transcriptions", content=b"x"), 404, "not_served"),
                (await post("/inference/v1/generate", json={}), 404, "not_served"),
                (await get("/metrics"), 404, "not_served"),
                (await get("/v1/completions/../../metrics"), 404, "not_served"),
                (await post("//v1/completions", json={}), 404, "not_served"),
            ]
            for answer, status, code in answers:
                assert answer.status_code == status, answer.request.url
                assert answer.json()["error"]["code"] == code
                assert answer.json()["error"]["message"]
        assert engine.engine.begun == 0
        await engine.kill()

    run(test())


def test_engines_errors_reach_the_client_as_they_are(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}) as gateway:
            for status in (400, 422, 429, 503, 500):
                answer = await gateway.ask(f"status={status}")
                assert answer.status_code == status
                assert answer.json()["error"]["message"] == "as asked"
            streamed = await gateway.stream("sse_error=400")
            assert streamed[0]["error"]["code"] == 400
        await engine.kill()

    run(test())


def test_a_long_body_is_passed_on_whole(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}) as gateway:
            prompt = "é" * 1_000_000
            body = json.dumps({"model": MODEL, "prompt": prompt}, ensure_ascii=False).encode()
            answer = await gateway.client.post("/v1/completions", content=body)
            assert answer.status_code == 200
        assert engine.engine.seen[0]["bytes"] == len(body)
        await engine.kill()

    run(test())


def test_conversations_keep_to_one_engine_over_their_turns(tmp_path: Path) -> None:
    async def test() -> None:
        engines = [await start_engine(name) for name in "abc"]
        named = {one.engine.name: one.url for one in engines}
        async with running_gateway(tmp_path, named) as gateway:
            homes = set()
            for session in range(12):
                messages = [{"role": "user", "content": f"session {session} tokens=1"}]
                said = set()
                for turn in range(4):
                    body = {"model": MODEL, "messages": messages, "stream": True}
                    answer = await gateway.client.post("/v1/chat/completions", json=body)
                    words = texts(events(answer.content))
                    said.add(words[0])
                    messages += [
                        {"role": "assistant", "content": words},
                        {"role": "user", "content": f"turn {turn} tokens=1"},
                    ]
                assert len(said) == 1
                homes |= said
            assert len(homes) > 1
        for one in engines:
            await one.kill()

    run(test())
