"""The identity middleware in front of a bare ASGI application."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trimtab.engine_bridge.vllm.identity import IdentitySettings
from trimtab.engine_bridge.vllm.middleware import IdentityMiddleware
from trimtab.engine_bridge.vllm.salt import tenant_salt

SECRET = b"0123456789abcdef"
LIES = {
    "vllm_xargs": {"trimtab_tier": "T0", "mine": 1},
    "priority": -9,
    "cache_salt": "stolen",
    "request_id": "mine",
    "tenant": "acme",
    "tier": "T0",
    "kv_transfer_params": {"remote_block_ids": [1]},
}
LYING_HEADERS = (
    (b"X-Vllm-Priority", b"-9"),
    (b"X-Request-Id", b"mine"),
    (b"X-data-parallel-rank", b"1"),
    (b"X-Trimtab-Tenant", b"acme"),
    (b"X-Trimtab-Tier", b"T0"),
)
Message = dict[str, Any]


@dataclass
class Downstream:
    """What is served behind the middleware: it reads the whole body, streams, waits for the end."""

    chunks: tuple[bytes, ...] = (b"one", b"two")
    wait_for_disconnect: bool = False
    calls: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    disconnected: bool = False

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        self.calls += 1
        self.headers = {name.lower(): value for name, value in scope.get("headers", ())}
        if scope["type"] != "http":
            return
        more = True
        while more:
            message = await receive()
            self.body += message.get("body", b"")
            more = message.get("more_body", False)
        if self.wait_for_disconnect:
            self.disconnected = (await receive())["type"] == "http.disconnect"
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.body))


@dataclass
class Client:
    """A client that sends a request in pieces and keeps what comes back."""

    app: Any
    sent: list[Message] = field(default_factory=list)

    def send(
        self,
        body: object = None,
        *,
        path: str = "/v1/completions",
        method: str = "POST",
        headers: Sequence[tuple[bytes, bytes]] = (),
        pieces: Sequence[Message] | None = None,
        kind: str = "http",
        root_path: str = "",
    ) -> int:
        """The status of the answer; 0 without one."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        queue = list(pieces or [{"type": "http.request", "body": raw, "more_body": False}])
        scope: Message = {"type": kind, "path": path, "root_path": root_path}
        scope["headers"] = [(b"content-type", b"application/json"), *headers]
        if kind == "http":
            scope["method"] = method

        async def receive() -> Message:
            return queue.pop(0) if queue else {"type": "http.disconnect"}

        async def keep(message: Message) -> None:
            self.sent.append(message)

        asyncio.run(self.app(scope, receive, keep))
        return int(self.sent[0].get("status", 0)) if self.sent else 0

    @property
    def answer(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)


def wrapped(downstream: Downstream, **settings: Any) -> Client:
    chosen = IdentitySettings(**settings)
    return Client(IdentityMiddleware(downstream, settings=chosen, secret=SECRET))


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"sk-crowd").hexdigest()
    path.write_text(f"crowd: {{tier: T3, keys_sha256: [{digest}]}}\n")
    return str(path)


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"],
)
def test_what_a_client_says_of_itself_is_replaced(keys: str, path: str) -> None:
    downstream = Downstream()
    body = {"prompt": "x", "stream": True, **LIES}
    headers = (*LYING_HEADERS, (b"Authorization", b"Bearer sk-crowd"))
    assert wrapped(downstream, keys=keys).send(body, path=path, headers=headers) == 200
    assert downstream.json == {
        "prompt": "x",
        "stream": True,
        "vllm_xargs": {"trimtab_tenant": "crowd", "trimtab_tier": "T3"},
        "priority": 3,
        "cache_salt": tenant_salt(SECRET, "crowd"),
    }
    lying = {name.lower() for name, _ in LYING_HEADERS}
    assert lying & set(downstream.headers) == {b"x-vllm-priority"}
    assert downstream.headers[b"x-vllm-priority"] == b"3"
    assert downstream.headers[b"content-length"] == b"%d" % len(downstream.body)


def test_labels_count_only_where_they_are_trusted() -> None:
    trusting, wary = Downstream(), Downstream()
    wrapped(trusting, trust_labels=True).send({}, headers=LYING_HEADERS)
    wrapped(wary).send({}, headers=LYING_HEADERS)
    assert trusting.json["vllm_xargs"] == {"trimtab_tenant": "acme", "trimtab_tier": "T0"}
    assert wary.json["vllm_xargs"] == {"trimtab_tenant": "anonymous", "trimtab_tier": "T3"}
    assert trusting.json["cache_salt"] != wary.json["cache_salt"]


def test_a_slice_is_one_where_labels_are_trusted(keys: str) -> None:
    trusting, wary, knowing = Downstream(), Downstream(), Downstream()
    slice_header = (b"X-Trimtab-Slice", b"1")
    wrapped(trusting, trust_labels=True).send({}, headers=[slice_header])
    wrapped(wary).send({}, headers=[slice_header])
    key = (b"authorization", b"Bearer sk-crowd")
    wrapped(knowing, trust_labels=True, keys=keys).send({}, headers=[slice_header, key])
    assert trusting.json["vllm_xargs"]["trimtab_slice"] == 1
    for downstream in (wary, knowing):
        assert "trimtab_slice" not in downstream.json["vllm_xargs"]
    assert all(b"x-trimtab-slice" not in one.headers for one in (trusting, wary, knowing))


def test_a_trusted_label_of_no_tier_is_an_error_of_the_gateway() -> None:
    downstream = Downstream()
    client = wrapped(downstream, trust_labels=True)
    assert client.send({}, headers=[(b"x-trimtab-tier", b"gold")]) == 400
    assert b"T0, T1, T2, T3" in client.answer
    assert downstream.calls == 0


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer sk-other")],
        [(b"authorization", b"Basic sk-crowd")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"\xff\xfe")],
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions/render"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    ],
)
def test_without_a_known_key_nothing_is_served(
    keys: str, headers: list[tuple[bytes, bytes]], method: str, path: str
) -> None:
    downstream = Downstream()
    client = wrapped(downstream, keys=keys)
    assert client.send({}, method=method, path=path, headers=headers) == 401
    error = json.loads(client.answer)["error"]
    assert error["code"] == "invalid_api_key"
    assert set(error) == {"message", "type", "param", "code"}
    assert downstream.calls == 0


def test_anthropics_header_holds_a_key_too(keys: str) -> None:
    downstream = Downstream()
    headers = [(b"x-api-key", b"sk-crowd")]
    assert wrapped(downstream, keys=keys).send({}, path="/v1/messages", headers=headers) == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/v1/completions"])
def test_health_metrics_and_preflights_need_no_key(keys: str, path: str) -> None:
    downstream = Downstream()
    method = "OPTIONS" if path.startswith("/v1") else "GET"
    assert wrapped(downstream, keys=keys).send({}, path=path, method=method) == 200


def test_under_fcfs_no_priority_is_stamped() -> None:
    downstream = Downstream()
    wrapped(downstream, priority=False).send(LIES, headers=LYING_HEADERS)
    assert "priority" not in downstream.json
    assert b"x-vllm-priority" not in downstream.headers


def test_an_embedding_takes_no_vllm_xargs() -> None:
    downstream = Downstream()
    wrapped(downstream).send({"input": "x", **LIES}, path="/v1/embeddings")
    assert set(downstream.json) == {"input", "priority", "cache_salt"}


@pytest.mark.parametrize(
    "body",
    [b"{no", b"", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 201 + b"1" + b"}" * 201],
)
def test_what_cannot_be_stamped_does_not_pass(body: bytes) -> None:
    downstream = Downstream()
    client = wrapped(downstream)
    assert client.send(body, headers=LYING_HEADERS) == 400
    assert json.loads(client.answer)["error"]["code"] == "invalid_json"
    assert downstream.calls == 0


def test_json_in_another_encoding_is_stamped_as_well() -> None:
    downstream = Downstream()
    wrapped(downstream).send(json.dumps({"prompt": "ü", **LIES}).encode("utf-16"))
    assert downstream.json["prompt"] == "ü"
    assert downstream.json["vllm_xargs"]["trimtab_tier"] == "T3"


def test_a_body_in_pieces_is_put_together() -> None:
    downstream = Downstream()
    raw = json.dumps({"prompt": "x" * 100}).encode()
    pieces = [
        {"type": "http.request", "body": raw[at : at + 7], "more_body": at + 7 < len(raw)}
        for at in range(0, len(raw), 7)
    ]
    headers = [(b"Transfer-Encoding", b"chunked")]
    assert wrapped(downstream).send(pieces=pieces, headers=headers) == 200
    assert downstream.json["prompt"] == "x" * 100
    assert b"transfer-encoding" not in downstream.headers


@pytest.mark.parametrize("says", [True, False])
def test_a_body_beyond_the_bound_is_refused(says: bool) -> None:
    downstream = Downstream()
    app = IdentityMiddleware(
        downstream, settings=IdentitySettings(), secret=SECRET, largest_body_bytes=100
    )
    raw = json.dumps({"prompt": "x" * 100}).encode()
    client = Client(app)
    headers = [(b"content-length", b"%d" % len(raw))] if says else []
    assert client.send(raw, headers=headers) == 413
    assert downstream.calls == 0


def test_a_stream_comes_through_piece_by_piece() -> None:
    client = wrapped(Downstream(chunks=(b"a", b"b", b"c")))
    client.send({})
    assert [m["body"] for m in client.sent if m["type"] == "http.response.body"] == [
        b"a",
        b"b",
        b"c",
        b"",
    ]


def test_a_client_that_leaves_while_it_is_served_is_noticed() -> None:
    downstream = Downstream(wait_for_disconnect=True)
    wrapped(downstream).send({"prompt": "x"})
    assert downstream.disconnected


def test_a_client_that_leaves_before_its_body_has_come_is_not_served() -> None:
    downstream = Downstream()
    pieces = [{"type": "http.request", "body": b"{", "more_body": True}]
    client = wrapped(downstream)
    assert client.send(pieces=pieces) == 0
    assert (downstream.calls, client.sent) == (0, [])


@pytest.mark.parametrize(
    "path",
    [
        "/inference/v1/generate",
        "/invocations",
        "/cohere/v2/chat",
        "/v1/completions/",
        "/v1/audio/transcriptions",
        "/generative_scoring",
        "/v1/made-tomorrow",
    ],
)
def test_a_path_that_reaches_the_engine_unstamped_is_closed(path: str) -> None:
    downstream = Downstream()
    client = wrapped(downstream)
    assert client.send(LIES, path=path) == 404
    assert json.loads(client.answer)["error"]["code"] == "not_served"
    assert downstream.calls == 0


def test_a_websocket_to_the_engine_is_closed() -> None:
    downstream = Downstream()
    client = wrapped(downstream)
    client.send(path="/v1/realtime", kind="websocket")
    assert client.sent[0]["type"] == "websocket.close"
    assert downstream.calls == 0


def test_the_prefix_of_a_proxy_hides_no_path() -> None:
    downstream = Downstream()
    sent = {"path": "/llm/v1/completions", "root_path": "/llm"}
    assert wrapped(downstream).send(LIES, **sent) == 200
    assert downstream.json["vllm_xargs"]["trimtab_tier"] == "T3"


def test_other_scopes_pass() -> None:
    downstream = Downstream()
    wrapped(downstream).send(path="", kind="lifespan")
    assert downstream.calls == 1
