"""Serves the daemon's web application from a thread of its own, so that no loop waits for it."""

from __future__ import annotations

import socket
import threading
import time
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from trimtab.engine_bridge.errors import InputError

_MOST_CONNECTIONS: Final = 128
_START_S: Final = 10.0
_STOP_S: Final = 5.0


class ListenError(InputError):
    """Nothing can listen at the address of the settings."""


def parse_listen(listen: str, where: str = "listen") -> tuple[str, int]:
    """Host and port of `host:port` or `[ipv6]:port`.

    Args:
        listen: The text.
        where: Where it stands, for the error.

    Raises:
        ListenError: it is not of that form.
    """
    host, separator, port = listen.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        separator = ""
    if not separator or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ListenError(where, value=listen, bound="host:port, for instance 127.0.0.1:9464")
    return host, int(port)


class WebServer:
    """One listening server; `start` and `stop` are called once each."""

    def __init__(self, app: ASGIApp, listen: str) -> None:
        """Prepare a server.

        Args:
            app: What answers.
            listen: `host:port`; port 0 takes a free one.

        Raises:
            ListenError: `listen` is of another form.
        """
        self._host, self._port = parse_listen(listen)
        self._listen = listen
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_level="warning",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                limit_concurrency=_MOST_CONNECTIONS,
                timeout_keep_alive=5,
                timeout_graceful_shutdown=1,
            )
        )
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where it listens, without a slash at the end."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def start(self) -> None:
        """Listen, and come back when requests are answered.

        Raises:
            ListenError: the address is in use, not ours, or not allowed.
        """
        self._socket = self._bind()
        self._port = self._socket.getsockname()[1]
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="trimtab-web", daemon=True
        )
        self._thread.start()
        until_s = time.monotonic() + _START_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < until_s:
            time.sleep(0.01)

    def stop(self) -> None:
        """Answer what is under way, at most for a second, and stop listening."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(_STOP_S)
        if self._socket is not None:
            self._socket.close()

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self._host, self._port))
            listening.listen(_MOST_CONNECTIONS)
        except OSError as error:
            listening.close()
            raise ListenError(
                "listen",
                value=self._listen,
                remedy=f"{error.strerror}; choose another port, or stop who listens there",
            ) from None
        return listening
