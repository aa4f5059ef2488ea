"""A client of the daemon's HTTP routes, for the command line.

It follows no redirect and asks no proxy: the token goes to the address that was named, and nowhere
else.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

from trimtab.controller.web.token import TOKEN_FILE, TOKEN_VARIABLE, read_token
from trimtab.engine_bridge.errors import InputError, TrimtabError

_TIMEOUT_S: Final = 5.0
_MOST_ANSWER_BYTES: Final = 64 * 2**20
_LOOK_EVERY_S: Final = 0.2
_TICKS_TO_WAIT: Final = 3.0


class DaemonUnavailableError(TrimtabError):
    """The daemon does not answer, or with something that is no daemon's answer."""


class DaemonRefusedError(InputError):
    """The daemon answers and refuses."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **named: Any) -> None:
        """Never: the redirect becomes an error."""


class DaemonClient:
    """Asks one daemon, one request a connection."""

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        wait: Callable[[float], None] = time.sleep,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Name the daemon; nothing is asked yet.

        Args:
            url: For instance `http://127.0.0.1:9464`.
            token: What orders show.
            wait: Waits for so many seconds.
            monotonic_s: A clock that never goes back, seconds.

        Raises:
            InputError: `url` is no address.
        """
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise InputError(
                "--at", value=url, bound="an address, for instance http://127.0.0.1:9464"
            )
        self._url, self._token = url.rstrip("/"), token
        self._wait, self._monotonic_s = wait, monotonic_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())

    def state(self, engine: str | None = None) -> dict[str, Any]:
        """How all engines stand, and with a name all about that one.

        Raises:
            DaemonUnavailableError: no answer.
            DaemonRefusedError: no engine has the name.
        """
        return self._ask("/api/state" + (f"?engine={quote(engine)}" if engine else ""))

    def order(self, kind: str, order: Mapping[str, Any]) -> list[str]:
        """Give an order.

        Args:
            kind: hold, release or mode.
            order: `engine` (None for all), `by`, and `mode`.

        Returns:
            The engines that it was given to.

        Raises:
            DaemonUnavailableError: no answer.
            DaemonRefusedError: the token, the engine or the order is not right.
        """
        engines: list[str] = self._ask(f"/api/{kind}", order)["engines"]
        return engines

    def after_next_tick(self, engines: Collection[str]) -> list[dict[str, Any]]:
        """How the engines stand once each loop has ticked again, or after three intervals.

        Raises:
            DaemonUnavailableError: no answer.
        """
        first = self._lines(engines)
        ticks = {line["engine"]: line["ticks"] for line in first}
        intervals_s = max((line["interval_s"] for line in first), default=0.0)
        until_s = self._monotonic_s() + _TICKS_TO_WAIT * intervals_s
        now = first
        # Two ticks: the first one may have been under way when the order came.
        while self._monotonic_s() < until_s and any(
            line["ticks"] < ticks[line["engine"]] + 2 for line in now
        ):
            self._wait(_LOOK_EVERY_S)
            now = self._lines(engines)
        return now

    def _lines(self, engines: Collection[str]) -> list[dict[str, Any]]:
        return [line for line in self.state()["engines"] if line["engine"] in engines]

    def _ask(self, path: str, order: Mapping[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(self._url + path)
        if order is not None:
            request.data = json.dumps(order).encode()
            request.add_header("Content-Type", "application/json")
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                said = json.loads(answer.read(_MOST_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            raise DaemonRefusedError(self._url, remedy=_refusal(error)) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = getattr(error, "reason", None) or error
            reason = getattr(cause, "strerror", None) or cause
            raise DaemonUnavailableError(
                f"{self._url}: {reason}; is `trimtab run` up, and is this its address (--at)?"
            ) from None
        if not isinstance(said, dict):
            raise DaemonUnavailableError(f"{self._url}: the answer is not the daemon's; see --at")
        return said


def operators_token(token_file: Path | None) -> str:
    """The token for orders: from the named file, the environment, or `state/token`.

    Raises:
        TokenError: it cannot be read or is not fit.
    """
    if token_file is None and TOKEN_VARIABLE in os.environ:
        return os.environ[TOKEN_VARIABLE].strip()
    return read_token(token_file or Path("state") / TOKEN_FILE)


def _refusal(error: urllib.error.HTTPError) -> str:
    """What the daemon said, or its status."""
    try:
        said = json.loads(error.read(65536))["error"]
    except (ValueError, KeyError, TypeError, OSError):
        said = f"status {error.code}"
    return f"refused: {said}"
