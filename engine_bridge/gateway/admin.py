"""The gateway's own door: health, readiness and metrics, on a port that clients do not reach."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from trimtab.engine_bridge.gateway import openapi
from trimtab.engine_bridge.gateway.metrics import GatewayMetrics


def make_admin(
    metrics: GatewayMetrics, registry: CollectorRegistry, unready: Callable[[], str]
) -> Starlette:
    """The application.

    Args:
        metrics: Brought up to date before they are shown.
        registry: What is shown.
        unready: Why no traffic should come; empty: it should.
    """

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        why = unready()
        return PlainTextResponse(f"{why or 'ok'}\n", status_code=503 if why else 200)

    async def show_metrics(request: Request) -> Response:
        metrics.refresh()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def describe(request: Request) -> Response:
        return Response(openapi.ADMIN, media_type="application/json")

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", show_metrics),
            Route(openapi.PATH, describe),
        ]
    )
