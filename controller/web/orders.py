"""The operator's door: what a POST orders, checked, and handed to the daemon.

An answer says that the order was taken; the loop carries it out at its next tick.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from trimtab.agents.verdict import GuardMode
from trimtab.controller.daemon.command import Command, CommandKind
from trimtab.controller.web.protect import check_host, check_origin, check_token, read_order
from trimtab.controller.web.state_json import modes_to_order
from trimtab.controller.web.view import DaemonView
from trimtab.engine_bridge.errors import did_you_mean

ORDERS: Final = (CommandKind.HOLD, CommandKind.RELEASE, CommandKind.MODE)
"""What can be ordered over HTTP, each at `/api/` and its name."""
_LONGEST_NAME: Final = 80


class OrderDoor:
    """Takes orders for one daemon."""

    def __init__(self, view: DaemonView, token: str, hosts: Collection[str]) -> None:
        """Open the door.

        Args:
            view: The daemon.
            token: What an order must show.
            hosts: The daemon's own host names, in lower case.
        """
        self._view, self._token, self._hosts = view, token, hosts

    async def take(self, request: Request, kind: CommandKind) -> Response:
        """Check one order and hand it on; 202 if it was taken.

        Raises:
            HTTPException: it is refused.
        """
        check_host(request.headers, self._hosts)
        check_origin(request.headers)
        check_token(request.headers, self._token)
        order = await read_order(request)
        _check_keys(order, {"engine", "by"} | ({"mode"} if kind is CommandKind.MODE else set()))
        engines = self._engines(order.get("engine"))
        mode = _mode(order.get("mode")) if kind is CommandKind.MODE else None
        from_where = request.client.host if request.client else "unknown"
        by = f"{_name(order.get('by'))} over HTTP from {from_where}"
        engine = order.get("engine")
        self._view.command(engine, Command(kind=kind, mode=mode, by=by))
        return JSONResponse({"ordered": kind.value, "engines": engines}, status_code=202)

    def _engines(self, engine: object) -> list[str]:
        known = list(self._view.states())
        if engine is None:
            return known
        if not isinstance(engine, str) or engine not in known:
            hint = did_you_mean(engine, known) or f"engines are {', '.join(known)}"
            raise HTTPException(404, f"no engine of this name; {hint}")
        return [engine]


def _check_keys(order: Mapping[str, Any], known: Collection[str]) -> None:
    for key in order:
        if key not in known:
            hint = did_you_mean(key, known) or f"keys are {', '.join(sorted(known))}"
            raise HTTPException(400, f"the order has a key that is not known; {hint}")


def _mode(value: object) -> GuardMode:
    known = [mode.value for mode in modes_to_order()]
    if value not in known:
        raise HTTPException(400, f"mode must be one of {', '.join(known)}")
    return GuardMode(value)


def _name(value: object) -> str:
    """Who orders, as they call themselves: fit for a line of a log."""
    if value is None:
        return "somebody"
    if not isinstance(value, str):
        raise HTTPException(400, "by must be a text")
    shown = "".join(c for c in value if c.isprintable()).strip()[:_LONGEST_NAME]
    return shown or "somebody"
