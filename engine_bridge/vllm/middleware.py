"""Stamps every request with its tenant and tier before vLLM's API server sees it.

A pure ASGI middleware for vLLM's `--middleware`. A client's own words on who it is, how urgent it
is and which cache it shares are dropped first: vLLM would believe them. It orders nothing. Whose a
request is, `identity` decides; whether it is admitted, `admission_door`, where there is one.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, Final

from trimtab.engine_bridge.admission.asked import is_too_deep, utf8_bytes
from trimtab.engine_bridge.admission.refusal import Refusal, no_json, unknown_key
from trimtab.engine_bridge.vllm.identity import (
    SLICE_ARG,
    TENANT_ARG,
    TIER_ARG,
    Identifier,
    Identity,
    IdentitySettings,
    LabelError,
    UnknownKeyError,
)
from trimtab.engine_bridge.vllm.salt import salt_secret, tenant_salt

if TYPE_CHECKING:
    from trimtab.engine_bridge.vllm.admission_door import AdmissionDoor, Admitted

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

LARGEST_BODY_BYTES: Final = 64 << 20
"""A request with a longer body is refused: it must be held in memory to be stamped."""
TENANT_HEADER: Final = b"x-trimtab-tenant"
TIER_HEADER: Final = b"x-trimtab-tier"
SLICE_HEADER: Final = b"x-trimtab-slice"
"""A trusted gateway's word that a request only reads the beginning of a prompt."""

STAMPED: Final = frozenset(
    (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
    )
)
"""Paths that generate and whose body carries the labels into the scheduler."""
STAMPED_WITHOUT_ARGS: Final = frozenset(("/v1/embeddings",))
"""Paths whose body has a priority and a cache salt, but no `vllm_xargs`."""
COUNTED: Final = ("/render", "/derender", "/count_tokens", "/tokenize", "/detokenize")
"""Endings of guarded paths that occupy no place in the engine, but the server's own CPU with a
prompt of any length: with admission each is one request of its tenant, of no tokens."""
HARMLESS: Final = (*COUNTED, "/cancel", "_lora_adapter")
"""Endings of guarded paths that occupy no place in the engine; they pass as they are."""
GUARDED: Final = (
    "/v1/",
    "/v2/",
    "/inference/",
    "/cohere/",
    "/invocations",
    "/generative_scoring",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/tokenize",
    "/detokenize",
)
"""Beginnings of the paths that reach the engine, or its tokenizer. What lies there and cannot be
stamped is refused: it would be served under whatever labels the client likes."""

_PRIORITY_HEADER: Final = b"x-vllm-priority"
_DROPPED_HEADERS: Final = frozenset(
    (
        _PRIORITY_HEADER,
        b"x-request-id",
        b"x-data-parallel-rank",
        TENANT_HEADER,
        TIER_HEADER,
        SLICE_HEADER,
    )
)
_BODY_HEADERS: Final = frozenset((b"content-length", b"transfer-encoding"))
_DROPPED_FIELDS: Final = (
    "priority",
    "cache_salt",
    "vllm_xargs",
    "request_id",
    "kv_transfer_params",  # would fetch another tenant's blocks from a KV store
    "tenant",
    "tier",
)
_READING: Final = frozenset(("GET", "HEAD", "OPTIONS"))


class IdentityMiddleware:
    """Drops what clients say about themselves and stamps what is known of them."""

    def __init__(
        self,
        app: App,
        *,
        settings: IdentitySettings | None = None,
        secret: bytes | None = None,
        largest_body_bytes: int = LARGEST_BODY_BYTES,
        door: AdmissionDoor | None = None,
    ) -> None:
        """Wrap an application.

        Args:
            app: What to wrap.
            settings: How requests are identified; None: as the environment says, which is how
                vLLM makes it.
            secret: What cache salts are derived from; None: as `salt.salt_secret` finds it.
            largest_body_bytes: Longest body, bytes.
            door: What judges requests; None: as the settings say, nothing without an admission
                file.

        Raises:
            InputError: plan, keys, secret or admission file cannot be used.
        """
        settings = IdentitySettings.from_environment() if settings is None else settings
        self._app = app
        self._identifier = Identifier.of(settings)
        self._priority = settings.priority
        self._secret = salt_secret() if secret is None else secret
        self._largest_body_bytes = largest_body_bytes
        self._door = door
        if door is None and settings.admission is not None:
            from trimtab.engine_bridge.vllm.admission_door import AdmissionDoor

            self._door = AdmissionDoor.of(settings, app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        path = _path(scope) if scope["type"] in ("http", "websocket") else ""
        if not path.startswith(GUARDED) or scope.get("method") == "OPTIONS":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "cannot be labelled"})
        else:
            await self._serve(path, scope, receive, send)

    async def _serve(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers = list(scope["headers"])
        try:
            identity = self._identifier.identify(
                key=_key(headers),
                tenant=_header(headers, TENANT_HEADER),
                tier=_header(headers, TIER_HEADER),
            )
        except UnknownKeyError:
            await _refuse(send, unknown_key())
            return
        except LabelError as error:
            message = str(error)
            await _refuse(send, Refusal(status=400, code="invalid_label", message=message))
            return
        kept = [(name, value) for name, value in headers if name.lower() not in _DROPPED_HEADERS]
        if path in STAMPED or path in STAMPED_WITHOUT_ARGS:
            is_slice = (
                self._identifier.believes_labels and _header(headers, SLICE_HEADER) is not None
            )
            scope = {**scope, "headers": kept}
            await self._stamp(path, identity, scope, receive, send, is_slice=is_slice)
        elif scope["method"] not in _READING and path.endswith(COUNTED) and self._door is not None:
            await self._count(path, identity, {**scope, "headers": kept}, receive, send)
        elif scope["method"] in _READING or path.endswith(HARMLESS):
            await self._app({**scope, "headers": kept}, receive, send)
        else:
            message = f"{path} is not served with tenants and tiers"
            await _refuse(send, Refusal(status=404, code="not_served", message=message))

    async def _stamp(
        self,
        path: str,
        identity: Identity,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        is_slice: bool,
    ) -> None:
        raw = await self._body(scope, receive, send)
        if raw is None:
            return
        data = _parsed(raw)
        if data is None:
            # Unlabelled, it might still be one to whoever reads it next.
            await _refuse(send, no_json())
            return
        admitted: Admitted | Refusal | None = None
        if self._door is not None:
            admitted = await self._door.admit(path, identity, data, utf8_bytes(raw), scope)
        if isinstance(admitted, Refusal):
            await _refuse(send, admitted)
            return
        headers = [(n, v) for n, v in scope["headers"] if n.lower() not in _BODY_HEADERS]
        if self._priority:
            # Some paths know the header only, others the body's field only.
            headers.append((_PRIORITY_HEADER, b"%d" % self._identifier.order(identity.tier)))
        stamped = self._stamped(path, identity, data, is_slice=is_slice)
        headers.append((b"content-length", b"%d" % len(stamped)))
        scope, receive = {**scope, "headers": headers}, _replay(stamped, receive)
        if self._door is None or admitted is None:
            await self._app(scope, receive, send)
        else:
            await self._door.serve(admitted, scope, receive, send)

    async def _count(
        self, path: str, identity: Identity, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Pass a request on that costs its tenant one request and no tokens."""
        assert self._door is not None
        raw = await self._body(scope, receive, send)
        if raw is None:
            return
        admitted = await self._door.admit(path, identity, {}, 0, scope)
        if isinstance(admitted, Refusal):
            await _refuse(send, admitted)
            return
        await self._door.serve(admitted, scope, _replay(raw, receive), send)

    async def _body(self, scope: Scope, receive: Receive, send: Send) -> bytes | None:
        """The whole body; None if the client has left, or was told that it is too long."""
        length = _header(scope["headers"], b"content-length") or "0"
        too_long = length.isdigit() and int(length) > self._largest_body_bytes
        body = None if too_long else await self._read(receive)
        if body is None:
            message = f"the body must be at most {self._largest_body_bytes} bytes"
            await _refuse(send, Refusal(status=413, code="body_too_large", message=message))
            return None
        return None if body is _GONE else bytes(body)

    async def _read(self, receive: Receive) -> bytearray | None:
        """The whole body; None if it is too long, `_GONE` if the client has left."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return _GONE
            body += message.get("body", b"")
            if len(body) > self._largest_body_bytes:
                return None
            if not message.get("more_body", False):
                return body

    def _stamped(
        self, path: str, identity: Identity, data: dict[str, Any], *, is_slice: bool
    ) -> bytes:
        """The body with the labels."""
        for field in _DROPPED_FIELDS:
            data.pop(field, None)
        data["cache_salt"] = tenant_salt(self._secret, identity.tenant)
        if path in STAMPED:
            data["vllm_xargs"] = {TENANT_ARG: identity.tenant, TIER_ARG: identity.tier}
            if is_slice:
                data["vllm_xargs"][SLICE_ARG] = 1
        if self._priority:
            data["priority"] = self._identifier.order(identity.tier)
        return json.dumps(data).encode()


_GONE: Final = bytearray()


def _parsed(body: bytes) -> dict[str, Any] | None:
    """The JSON object in a body; None if there is none, or one too deep for vLLM to read."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and not is_too_deep(body, data) else None


def _path(scope: Scope) -> str:
    """The path that the routes see: without the prefix that a proxy in front has added."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    inside = root and path.startswith(root) and path[len(root) :].startswith("/")
    return path[len(root) :] if inside else path


def _header(headers: Headers, name: bytes) -> str | None:
    """The first header of a name, in lower case; None where there is none."""
    return next((value.decode("latin-1") for key, value in headers if key.lower() == name), None)


def _key(headers: Headers) -> str | None:
    """The API key: `Authorization: Bearer`, or `x-api-key` as Anthropic's clients send it."""
    scheme, _, key = (_header(headers, b"authorization") or "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return _header(headers, b"x-api-key")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Hands out the body once, then what comes from the client, so that a disconnect aborts."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _refuse(send: Send, refusal: Refusal) -> None:
    """Answer with an error in OpenAI's form."""
    body = refusal.body()
    headers = [*refusal.headers(), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
