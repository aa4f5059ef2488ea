"""What stands between the network and the daemon: headers, the token, host names, body sizes.

Reading is open to whoever reaches the port, but not to a browser page of somebody else's. An order
needs the token as well. Metrics and health, which programs read under any name, check nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
from collections.abc import Collection, Mapping
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BODY_BYTES: Final = 4096
"""An order is a hundred bytes."""
_BODY_S: Final = 5.0
"""Time for a body to arrive, seconds."""

_HEADERS: Final = tuple(
    (name.encode(), value.encode())
    for name, value in {
        "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
        "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }.items()
)


class ProtectiveHeaders:
    """Adds to every answer what forbids a browser to mix it with anything foreign."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def check_token(headers: Mapping[str, str], token: str) -> None:
    """Let pass who shows the token.

    Raises:
        HTTPException: 401 without a token, 403 with another one.
    """
    scheme, _, shown = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not shown.strip():
        raise HTTPException(
            401,
            "an order needs the header Authorization: Bearer TOKEN",
            headers={"WWW-Authenticate": "Bearer"},
        )
    if not hmac.compare_digest(shown.strip().encode(), token.encode()):
        raise HTTPException(403, "this is not the daemon's token")


def check_host(headers: Mapping[str, str], hosts: Collection[str]) -> None:
    """Let pass what was addressed to us, by an address or by a name that is ours.

    A page of somebody else's can make its own name lead here (DNS rebinding), but it cannot make
    the browser send another name than its own.

    Args:
        headers: The request's.
        hosts: Our names, in lower case.

    Raises:
        HTTPException: 403 for another host.
    """
    name = _split(f"//{headers.get('host', '')}").hostname or ""
    if not _is_address(name) and name not in hosts:
        raise HTTPException(
            403, "not one of the daemon's host names; use its address, or list the name in `hosts`"
        )


def check_origin(headers: Mapping[str, str]) -> None:
    """Let pass what no browser page of another origin has sent.

    Raises:
        HTTPException: 403 for such a page.
    """
    origin = headers.get("origin")
    if origin is not None and _split(origin).netloc.lower() != headers.get("host", "").lower():
        raise HTTPException(403, "an order cannot come from a page of another origin")


async def read_order(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body; none is an empty one.

    Raises:
        HTTPException: 413 for a body that is too large, 408 for one that does not arrive, 400 for
            one that is no JSON object.
    """
    try:
        body = await asyncio.wait_for(_body(request), _BODY_S)
    except TimeoutError:
        raise HTTPException(408, "the body did not arrive in time") from None
    try:
        order = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    if not isinstance(order, dict):
        raise HTTPException(400, "the body must be a JSON object")
    return order


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise HTTPException(413, f"the body must be at most {MOST_BODY_BYTES} bytes")
    return bytes(body)


def _split(address: str) -> SplitResult:
    """The parts of an address; none of one that has no form."""
    try:
        return urlsplit(address)
    except ValueError:
        return SplitResult("", "", "", "", "")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
