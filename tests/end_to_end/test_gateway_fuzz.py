"""Whatever clients send: no fault of the gateway's own, no stack, nobody unlabelled behind it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.end_to_end import hostile
from tests.end_to_end.gateway_process import (
    EngineProcess,
    GatewayProcess,
    engine_process,
    gateway_process,
)
from trimtab.engine_bridge.gateway.proxy import SERVED
from trimtab.engine_bridge.gateway.request_body import CLAIMS

KEY: Final = "sk-acme"
MODEL: Final = "m"
LORISES: Final = 40
PATHS: Final = st.sampled_from(sorted(SERVED)) | st.sampled_from(
    ("/v1/models", "/v1/models/m", "/v1/audio/speech", "/metrics", "/health", "/tokenize",
     "/counts", "/v1/completions/", "/v1//completions", "/v1/chat/completions/../completions",
     "/openapi.json", "/v1/completions?tier=T1", "/v1/completions%00", "/V1/completions")
)  # fmt: skip
HEADERS: Final = st.dictionaries(
    st.sampled_from(
        (*hostile.LYING_HEADERS, "Accept", "Traceparent", "Content-Type", "Accept-Encoding",
         "Content-Encoding", "X-Api-Key", "Forwarded", "Te")
    ),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20),
    max_size=3,
)  # fmt: skip
METHODS: Final = ("POST", "GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW")


@pytest.fixture(scope="module")
def behind(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[GatewayProcess, EngineProcess]]:
    folder: Path = tmp_path_factory.mktemp("gateway")
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    (folder / "keys.yaml").write_text(f"acme: {{tier: T0, keys_sha256: [{digest}]}}\n")
    limits = {"tiers": {"T0": {"output_tokens_per_minute": 10**9, "max_prompt_tokens": 10**6}}}
    (folder / "admission.yaml").write_text(yaml.safe_dump(limits))
    with ExitStack() as stack:
        engine = stack.enter_context(engine_process("a", token_s=0.0))
        gateway_settings: dict[str, Any] = {
            "keys": "keys.yaml",
            "admission": "admission.yaml",
            "engines": {"a": {"url": engine.url, "models": [MODEL]}},
            "time_outs": {"head_s": 1.0, "body_s": 1.0},
            "caps": {"body_mib": 16},
        }
        yield stack.enter_context(gateway_process(folder, gateway_settings)), engine


@pytest.fixture(scope="module")
def client(behind: tuple[GatewayProcess, EngineProcess]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=behind[0].url, timeout=30) as opened:
        yield opened


BEARER: Final = {"Authorization": f"Bearer {KEY}"}
SOUND: Final = {"model": MODEL, "prompt": "tokens=1"}


def serves(client: httpx.Client) -> bool:
    """Whether somebody who asks for nothing odd is answered."""
    return client.post("/v1/completions", json=SOUND, headers=BEARER).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_every_trick_in_a_body(client: httpx.Client, path: str) -> None:
    for body, headers in hostile.fixed_bodies(MODEL, large=path == "/v1/chat/completions"):
        sent = {name: value.encode("latin-1") for name, value in {**BEARER, **headers}.items()}
        answer = client.post(path, content=body, headers=sent)
        # The small engine's JSON has no bounds that ours has not: it never fails.
        assert not hostile.harmless(answer.status_code, answer.content), (body[:200], answer.text)
    assert serves(client)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=PATHS, body=hostile.odd_bodies(MODEL), headers=HEADERS, known=st.booleans())
def test_any_json_object(
    client: httpx.Client, path: str, body: bytes, headers: dict[str, str], known: bool
) -> None:
    answer = client.post(path, content=body, headers={**headers, **(BEARER if known else {})})
    assert not hostile.harmless(answer.status_code, answer.content)
    if not known and path != "/openapi.json" and headers.get("X-Api-Key") != KEY:
        assert answer.status_code == 401


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=PATHS,
    raw=st.binary(max_size=200) | st.text(max_size=100).map(str.encode),
    method=st.sampled_from(METHODS),
)
def test_any_bytes_by_any_method(client: httpx.Client, path: str, raw: bytes, method: str) -> None:
    answer = client.request(method, path, content=raw, headers=BEARER)
    assert answer.status_code < 500
    if method != "HEAD":
        assert not hostile.harmless(answer.status_code, answer.content)


def test_bytes_that_are_no_sound_request(
    behind: tuple[GatewayProcess, EngineProcess], client: httpx.Client
) -> None:
    port = urlsplit(behind[0].url).port
    assert port is not None
    for name, pieces in hostile.raw_requests(KEY, MODEL).items():
        before = behind[1].begun()
        came = hostile.say(port, pieces, every_s=0.01, patience_s=0.5)
        found = hostile.answers(came)
        for status, body in found:
            assert not hostile.harmless(status, body), name
        passed = behind[1].begun() - before
        sound = {"two sound ones in line": 2, "a sound one and noise": 1}.get(name, 0)
        if "bare" not in name:  # some parsers take them for ends of lines
            assert passed == sound, f"{name}: {passed} have passed, {found}"
    assert serves(client)


def test_who_sends_slowly_is_cut_off_and_keeps_nobody_waiting(
    behind: tuple[GatewayProcess, EngineProcess], client: httpx.Client
) -> None:
    port = urlsplit(behind[0].url).port
    head = hostile.POST + f"authorization: Bearer {KEY}\r\n".encode()

    async def drip(begin: bytes, code: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begin)
        try:
            async with asyncio.timeout(10):
                while not (came := await _soon(reader)):
                    writer.write(b"x")
                    await writer.drain()
                came += await reader.read()
                assert code.encode() in came
                assert b" 408 " in came[:20]
        except ConnectionError:
            pass  # cut off between two drops
        finally:
            writer.close()

    async def all_at_once() -> None:
        heads = [drip(head + b"x: ", "head_too_slow") for _ in range(LORISES)]
        bodies = [
            drip(head + b"content-length: 99\r\n\r\n{", "body_too_slow") for _ in range(LORISES)
        ]
        served = asyncio.to_thread(lambda: [serves(client) for _ in range(20)])
        *_, answered = await asyncio.gather(*heads, *bodies, served)
        assert all(answered)

    asyncio.run(all_at_once())


async def _soon(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(4096), 0.1)
    except TimeoutError:
        return b""


def test_huge_bodies_are_cut_off(client: httpx.Client) -> None:
    def without_end() -> Iterator[bytes]:
        yield b'{"model":"m","prompt":"'
        for _ in range(64):
            yield b"x" * (1 << 20)

    try:
        answer = client.post("/v1/completions", content=without_end(), headers=BEARER)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    except httpx.TransportError:
        pass  # cut off while it still sent
    head = hostile.POST + f"authorization: Bearer {KEY}\r\n".encode()
    port = client.base_url.port
    assert port is not None
    came = hostile.say(port, (head + b"content-length: %d\r\n\r\n{" % (1 << 40),), patience_s=5.0)
    ((status, body),) = hostile.answers(came)
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
    assert serves(client)


def test_the_engine_has_seen_nobody_unlabelled(
    behind: tuple[GatewayProcess, EngineProcess],
) -> None:
    gateway, engine = behind
    found = engine.counts()
    assert found["begun"] > 200
    for one in found["seen"]:
        assert one["headers"]["x-trimtab-tenant"] == "acme"
        assert one["headers"]["x-trimtab-tier"] == "T0"
        assert not {"x-vllm-priority", "x-request-id", "x-data-parallel-rank"} & set(one["headers"])
        assert KEY not in json.dumps(one["headers"])
        assert CLAIMS.isdisjoint(one["fields"])
    assert gateway.metric("trimtab_gateway_refusals_total", code="internal_error") == 0
    assert gateway.metric("trimtab_gateway_open_requests") == 0
    assert gateway.metric("trimtab_gateway_held_bytes") == 0
