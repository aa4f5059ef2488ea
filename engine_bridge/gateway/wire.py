"""Heads of requests and answers as they go over: what is passed on, dropped, and added.

Hop-by-hop headers (RFC 9110, 7.6.1) end here, and so does all that a client says of whose its
request is. Nothing is sent here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from trimtab.engine_bridge.gateway.upstream import Client, Header
from trimtab.engine_bridge.vllm.middleware import SLICE_HEADER, TENANT_HEADER, TIER_HEADER

_HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_PASSED_TO_ENGINES: Final = frozenset(
    (b"accept", b"traceparent", b"tracestate", b"user-agent", b"anthropic-version", b"openai-beta")
)
"""Few are of use to an engine; others could only tell it what the client may not."""
_NAME: Final = re.compile(rb"[A-Za-z0-9_-]+")
_UNFIT: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""What the server would refuse to send in a value."""
_OURS_TO_SET: Final = frozenset((b"date", b"server", b"x-powered-by", b"set-cookie"))


def request_head(
    client: Client,
    method: bytes,
    path: bytes,
    headers: Iterable[Header],
    *,
    key: str | None,
    tenant: str = "",
    tier: str = "",
    is_slice: bool = False,
    length: int | None = None,
    trace: bytes = b"",
) -> bytes:
    """Request line and headers of a request to an engine.

    Args:
        client: Connections to it.
        method: For instance POST.
        path: Below the engine's own prefix, with a leading slash; empty: the prefix alone.
        headers: The client's own.
        key: API key that the engine asks for.
        tenant: Whose it is; empty: the gateway's own request. Like the next.
        tier: Its tier.
        is_slice: Whether it only reads the beginning of a prompt.
        length: Bytes of the body; None: there is none.
        trace: Lines of headers that say which trace it belongs to.
    """
    lines = [
        b"%b %b HTTP/1.1\r\nhost: %b\r\naccept-encoding: identity\r\n"
        % (method, client.prefix + path or b"/", client.host_header)
    ]
    if key is not None:
        lines.append(b"authorization: Bearer %b\r\n" % key.encode())
    if tenant:
        lines.append(b"%b: %b\r\n%b: %b\r\n" % (
            TENANT_HEADER, tenant.encode("latin-1"), TIER_HEADER, tier.encode("ascii")
        ))  # fmt: skip
    if is_slice:
        lines.append(b"%b: 1\r\n" % SLICE_HEADER)
    if length is not None:
        lines.append(b"content-type: application/json\r\ncontent-length: %d\r\n" % length)
    lines += [b"%b: %b\r\n" % header for header in headers if header[0] in _PASSED_TO_ENGINES]
    lines.append(trace + b"\r\n")
    return b"".join(lines)


def answer_headers(headers: list[Header], *, keep_length: bool) -> list[Header]:
    """The headers of an engine's answer that go on to the client.

    Args:
        headers: All of them, names in lower case.
        keep_length: Whether the body goes on as it is.
    """
    dropped: frozenset[bytes] | set[bytes] = _HOP_BY_HOP
    named = [value for name, value in headers if name == b"connection"]
    if named:
        dropped = dropped | {word.strip().lower() for value in named for word in value.split(b",")}
    return [
        (name, value)
        for name, value in headers
        if name not in dropped
        and name not in _OURS_TO_SET
        and (keep_length or name != b"content-length")
        and _NAME.fullmatch(name)
        and not _UNFIT.search(value)
    ]


def first(headers: Iterable[Header], name: bytes) -> bytes | None:
    """The first header of a name, which is in lower case; None where there is none."""
    return next((value for key, value in headers if key == name), None)


def api_key(headers: Iterable[Header]) -> str | None:
    """The client's key: `Authorization: Bearer`, or `x-api-key` as Anthropic's clients send it."""
    other = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer" and key.strip():
                return key.strip()
        elif name == b"x-api-key":
            other = other or value.decode("latin-1")
    return other
