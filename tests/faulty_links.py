"""Links that fail on demand, to stand between a controller and the real parts that it talks to.

They pass on what real parts say, or spoil it. They know neither metrics nor the control protocol
beyond the form of a number.
"""

from __future__ import annotations

import contextlib
import enum
import re
import select
import socket
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Self

NOISE: Final = b"\x00\xff <html> {half \n" * 40
PIECE_S: Final = 0.2
"""Time between two bytes of a dripping answer, seconds."""
_ANSWER_S: Final = 5.0
_LOOK_S: Final = 0.05
_PAGE_NUMBER: Final = re.compile(rb"^(trimtab_\S+(?: \S+)*?) \S+$", re.MULTILINE)
_API_NUMBER: Final = re.compile(rb'(\[[\d.]+,\s*)"[^"]*"\]')


class Behaviour(enum.StrEnum):
    """How a link behaves."""

    NORMAL = "normal"
    SLOW = "slow"
    """The right answer after `delay_s`."""
    DRIP = "drip"
    """The right answer, a byte at a time."""
    UNAVAILABLE = "unavailable"
    """HTTP 503; the control socket closes the connection."""
    NAN = "nan"
    """The right answer with NaN for every number."""
    STALE = "stale"
    """The last right answer, for ever."""
    GARBAGE = "garbage"
    """An answer that makes no sense."""
    HANG = "hang"
    """No answer, and an open connection."""
    DOWN = "down"
    """Nobody listens."""


class Proxy:
    """Stands before an HTTP server: a page of metrics, or Prometheus."""

    def __init__(self, target: str, *, delay_s: float = 3.0) -> None:
        """Listen on a free port of the loopback.

        Args:
            target: `http://host:port`; paths are passed on.
            delay_s: Of a slow answer, seconds.
        """
        self.target, self.delay_s = target.rstrip("/"), delay_s
        self.behaviour = Behaviour.NORMAL
        self.requests = 0
        self._last: dict[str, tuple[int, str, bytes]] = {}
        self._moved = threading.Event()
        self._server = self._listen(0)
        self._port = int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def behave(self, behaviour: Behaviour) -> None:
        """Behave so from now on; whoever hangs is let go."""
        before, self.behaviour = self.behaviour, behaviour
        self._moved.set()
        self._moved = threading.Event()
        if behaviour is Behaviour.DOWN and before is not Behaviour.DOWN:
            self._close()
        elif before is Behaviour.DOWN and behaviour is not Behaviour.DOWN:
            self._server = self._listen(self._port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.behave(Behaviour.DOWN)

    def _listen(self, port: int) -> ThreadingHTTPServer:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy._answer(self)

            do_POST = do_GET

            def log_message(self, format: str, *values: Any) -> None:
                """Say nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(_LOOK_S,), daemon=True).start()
        return server

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests += 1
        behaviour, moved = self.behaviour, self._moved
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        if behaviour is Behaviour.HANG:
            moved.wait(600)
            return
        if behaviour is Behaviour.SLOW and moved.wait(self.delay_s):
            return
        status, kind, content = self._content(handler, body, behaviour)
        with contextlib.suppress(OSError):
            handler.send_response(status)
            handler.send_header("content-type", kind)
            handler.send_header("content-length", str(len(content)))
            handler.end_headers()
            if behaviour is not Behaviour.DRIP:
                handler.wfile.write(content)
                return
            for place in range(len(content)):
                handler.wfile.write(content[place : place + 1])
                if moved.wait(PIECE_S):
                    return

    def _content(
        self, handler: BaseHTTPRequestHandler, body: bytes, behaviour: Behaviour
    ) -> tuple[int, str, bytes]:
        if behaviour is Behaviour.UNAVAILABLE:
            return 503, "text/plain", b"try again later\n"
        if behaviour is Behaviour.GARBAGE:
            return 200, "text/plain", NOISE
        path = handler.path.partition("?")[0]
        if behaviour is Behaviour.STALE and path in self._last:
            return self._last[path]
        found = self._last[path] = self._pass_on(handler, body)
        if behaviour is Behaviour.NAN:
            return found[0], found[1], without_numbers(found[2])
        return found

    def _pass_on(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, str, bytes]:
        headers = {
            name: value
            for name, value in handler.headers.items()
            if name.lower() in ("accept", "authorization", "content-type")
        }
        request = urllib.request.Request(
            self.target + handler.path, body or None, headers, method=handler.command
        )
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                return answer.status, answer.headers["content-type"] or "", answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers["content-type"] or "", error.read()
        except OSError as error:
            return 502, "text/plain", str(error).encode()


def without_numbers(content: bytes) -> bytes:
    """A page of metrics, or an answer of Prometheus' API, with NaN for every number."""
    if content.lstrip().startswith(b"{"):
        return _API_NUMBER.sub(rb'\1"NaN"]', content)
    return _PAGE_NUMBER.sub(rb"\1 NaN", content)


class SocketProxy:
    """Stands before a control socket (Unix)."""

    def __init__(self, target: Path, path: Path) -> None:
        """Listen at `path`, pass on to `target`."""
        self.target, self.path = target, path
        self.behaviour = Behaviour.NORMAL
        self._links: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._listen()

    def behave(self, behaviour: Behaviour) -> None:
        """Behave so from now on. Open connections keep open while it hangs, drips or spoils."""
        before, self.behaviour = self.behaviour, behaviour
        if behaviour in (Behaviour.NORMAL, Behaviour.DOWN, Behaviour.UNAVAILABLE):
            self._drop()
        if behaviour is Behaviour.DOWN and self._listener is not None:
            # The file stays, as that of an engine that was killed: connections are refused.
            self._listener.close()
            self._listener = None
        elif before is Behaviour.DOWN and behaviour is not Behaviour.DOWN:
            self._listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.behave(Behaviour.DOWN)
        self.path.unlink(missing_ok=True)

    def _listen(self) -> None:
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen(16)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                # A thread in accept() would keep the listener alive after its end.
                if not select.select([listener], [], [], _LOOK_S)[0]:
                    continue
                link, _ = listener.accept()
            except (OSError, ValueError):
                return
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _drop(self) -> None:
        for link in list(self._links):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _serve(self, link: socket.socket) -> None:
        self._links.add(link)
        with contextlib.suppress(OSError), link:
            if self.behaviour is Behaviour.UNAVAILABLE:
                return
            with socket.socket(socket.AF_UNIX) as engine:
                engine.settimeout(_ANSWER_S)
                engine.connect(str(self.target))
                while (asked := link.recv(65536)) and self._exchange(asked, link, engine):
                    pass
        self._links.discard(link)

    def _exchange(self, asked: bytes, link: socket.socket, engine: socket.socket) -> bool:
        """Answer one line; whether the connection goes on."""
        behaviour = self.behaviour
        if behaviour is Behaviour.HANG:
            return True
        if behaviour is Behaviour.GARBAGE:
            link.sendall(NOISE)
            return True
        while not asked.endswith(b"\n"):
            asked += link.recv(65536)
        engine.sendall(asked)
        answer = b""
        while not answer.endswith(b"\n"):
            if not (data := engine.recv(65536)):
                return False
            answer += data
        if behaviour is not Behaviour.DRIP:
            link.sendall(answer)
            return True
        for place in range(len(answer)):
            link.sendall(answer[place : place + 1])
            time.sleep(PIECE_S)
            if self.behaviour is not Behaviour.DRIP:
                return False
        return True
