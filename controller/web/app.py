"""The daemon over HTTP: dashboard, state, metrics, health, and the operator's door.

Routes only. It reads the loops' states and never waits for a loop; the files of the page are in
`page/`.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from importlib import metadata, resources
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trimtab.controller.daemon.command import CommandKind
from trimtab.controller.web.health import not_alive, not_ready
from trimtab.controller.web.metrics import DaemonMetrics
from trimtab.controller.web.orders import ORDERS, OrderDoor
from trimtab.controller.web.protect import ProtectiveHeaders, check_host
from trimtab.controller.web.state_json import detail, overview
from trimtab.controller.web.view import DaemonView
from trimtab.engine_bridge.errors import did_you_mean

PAGE: Final = {
    "/": ("dashboard.html", "text/html"),
    "/dashboard.css": ("dashboard.css", "text/css"),
    "/dashboard.js": ("dashboard.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/curves.js": ("curves.js", "text/javascript"),
    "/decisions.js": ("decisions.js", "text/javascript"),
    "/elements.js": ("elements.js", "text/javascript"),
    "/orders.js": ("orders.js", "text/javascript"),
    "/tiers.js": ("tiers.js", "text/javascript"),
}
"""File and type of everything that the page is made of, by its path."""
ICON: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    '<rect width="32" height="32" rx="6" fill="#0b69b7"/>'
    '<path d="M5 20c6 0 6-8 12-8" fill="none" stroke="#fff" stroke-width="3"/>'
    '<path d="M17 12l9 6" stroke="#ffd166" stroke-width="4"/></svg>'
)
"""What the browser shows beside the page's title."""


def make_app(view: DaemonView, token: str, *, hosts: Collection[str] = ()) -> Starlette:
    """The web application of one daemon.

    Args:
        view: The daemon.
        token: What orders must show.
        hosts: Names under which the daemon is reached, beside `localhost`, the machine's own name
            and addresses.
    """
    ours = {host.lower() for host in ("localhost", socket.gethostname(), *hosts)}
    pages = _Pages(view, metadata.version("trimtab"), ours)
    door = OrderDoor(view, token, ours)
    routes = [
        *(_content_route(path, _file(name), kind) for path, (name, kind) in PAGE.items()),
        _content_route("/icon.svg", ICON.encode(), "image/svg+xml"),
        Route("/api/state", pages.state),
        Route("/metrics", pages.metrics),
        Route("/healthz", pages.alive),
        Route("/readyz", pages.ready),
        *(_order_route(door, kind) for kind in ORDERS),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(ProtectiveHeaders),
            Middleware(GZipMiddleware, minimum_size=2048, compresslevel=4),
        ],
        exception_handlers={HTTPException: _refusal},
    )


class _Pages:
    """What can be read."""

    def __init__(self, view: DaemonView, version: str, hosts: Collection[str]) -> None:
        self._view, self._version, self._hosts = view, version, hosts
        self._started_unix_s = view.now_unix_s()
        self._metrics = DaemonMetrics(view.states, view.now_unix_s, version=version)

    async def state(self, request: Request) -> Response:
        """Every engine in a line, and with `?engine=NAME` all about one; `&since=` shortens it."""
        check_host(request.headers, self._hosts)
        states, now_unix_s = self._view.states(), self._view.now_unix_s()
        answer = overview(states, now_unix_s, self._version)
        engine = request.query_params.get("engine")
        if engine is not None:
            if engine not in states:
                hint = did_you_mean(engine, states) or f"engines are {', '.join(states)}"
                raise HTTPException(404, f"no engine of this name; {hint}")
            since = request.query_params.get("since", "0")
            if not (since.isascii() and since.isdigit() and len(since) < 16):
                raise HTTPException(400, "since must be the number of a decision")
            answer["detail"] = detail(states[engine], now_unix_s, since=int(since))
        return JSONResponse(answer)

    async def metrics(self, request: Request) -> Response:
        text, content_type = self._metrics.scrape(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    async def alive(self, request: Request) -> Response:
        found = not_alive(self._view.states(), self._view.now_unix_s(), self._started_unix_s)
        return _health("alive", found)

    async def ready(self, request: Request) -> Response:
        found = not_ready(self._view.states(), self._view.now_unix_s(), self._started_unix_s)
        return _health("ready", found)


def _health(word: str, found: dict[str, str]) -> Response:
    return JSONResponse({word: not found, "engines": found}, status_code=503 if found else 200)


def _file(name: str) -> bytes:
    return (resources.files("trimtab.controller.web") / "page" / name).read_bytes()


def _content_route(path: str, content: bytes, kind: str) -> Route:
    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind)

    return Route(path, answer)


def _order_route(door: OrderDoor, kind: CommandKind) -> Route:
    async def answer(request: Request) -> Response:
        return await door.take(request, kind)

    return Route(f"/api/{kind.value}", answer, methods=["POST"])


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)
