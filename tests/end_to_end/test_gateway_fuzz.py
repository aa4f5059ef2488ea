"""Whatever clients send: no fault of the gateway's own, no stack, nobody unlabelled behind it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.end_to_end.gateway_process import (
    EngineProcess,
    GatewayProcess,
    engine_process,
    gateway_process,
)
from trimtab.engine_bridge.gateway.proxy import SERVED
from trimtab.engine_bridge.gateway.request_body import CLAIMS

KEY = "sk-acme"
FIELDS = (
    "model", "prompt", "messages", "input", "stream", "stream_options", "max_tokens", "n", "tools",
    "max_completion_tokens", "store", "system", "suffix", "best_of", "usage", "error",
)  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(
        ("m", "user", "tokens=2", "tokens=9 wait=0.01", "status=500", "sse_error=500")
    )
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(("role", "content", "text", "type", "image_url", "url")) | st.text(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(
    st.sampled_from((*FIELDS, *sorted(CLAIMS))) | st.text(max_size=8), VALUES, max_size=8
)
HEADERS = st.dictionaries(
    st.sampled_from(
        ("X-Trimtab-Tenant", "X-Trimtab-Tier", "X-Vllm-Priority", "X-Request-Id", "Accept",
         "Traceparent", "Content-Type", "Accept-Encoding")
    ),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20),
    max_size=3,
)  # fmt: skip
PATHS = st.sampled_from(sorted(SERVED)) | st.sampled_from(
    ("/v1/models", "/v1/models/m", "/v1/audio/speech", "/metrics", "/health", "/tokenize",
     "/counts", "/v1/completions/", "/v1//completions", "/v1/chat/completions/../completions")
)  # fmt: skip


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
            "engines": {"a": {"url": engine.url, "models": ["m"]}},
        }
        yield stack.enter_context(gateway_process(folder, gateway_settings)), engine


def harmless(answer: httpx.Response) -> None:
    """The engine's answer, or a refusal in OpenAI's form."""
    assert "Traceback" not in answer.text
    assert 'File "' not in answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) >= {"message", "code"}
        assert answer.status_code < 500 or error["message"] == "as asked"


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=PATHS, body=BODIES, headers=HEADERS, known=st.booleans())
def test_any_json_object(
    behind: tuple[GatewayProcess, EngineProcess],
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    known: bool,
) -> None:
    gateway, _ = behind
    body.setdefault("model", "m")
    credentials = {"Authorization": f"Bearer {KEY}"} if known else {}
    with httpx.Client(base_url=gateway.url, timeout=30) as client:
        answer = client.post(path, json=body, headers={**headers, **credentials})
    harmless(answer)
    if not known:
        assert answer.status_code == 401


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=PATHS,
    raw=st.binary(max_size=200) | st.text(max_size=100).map(str.encode),
    method=st.sampled_from(("POST", "GET", "PUT", "DELETE", "PATCH", "OPTIONS")),
)
def test_any_bytes_by_any_method(
    behind: tuple[GatewayProcess, EngineProcess], path: str, raw: bytes, method: str
) -> None:
    gateway, _ = behind
    with httpx.Client(base_url=gateway.url, timeout=30) as client:
        answer = client.request(
            method, path, content=raw, headers={"Authorization": f"Bearer {KEY}"}
        )
    harmless(answer)


def test_the_engine_has_seen_nobody_unlabelled(
    behind: tuple[GatewayProcess, EngineProcess],
) -> None:
    gateway, engine = behind
    found = engine.counts()
    assert found["begun"] > 20
    for one in found["seen"]:
        assert one["headers"]["x-trimtab-tenant"] == "acme"
        assert one["headers"]["x-trimtab-tier"] == "T0"
        assert "x-vllm-priority" not in one["headers"]
        assert CLAIMS.isdisjoint(one["body"] or {})
    assert gateway.metric("trimtab_gateway_refusals_total", code="internal_error") == 0
    assert gateway.metric("trimtab_gateway_open_requests") == 0
