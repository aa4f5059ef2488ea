"""One HTTP GET that ends by its deadline, whatever the other side does.

Time-outs of HTTP libraries count for each wait, so a server that sends a byte now and then holds
them up for ever. No redirects, no proxies, no retries, no kept connections.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from trimtab.engine_bridge.errors import InputError
from trimtab.engine_bridge.live.snapshot import TelemetryUnavailableError, Unavailable

MOST_BYTES: Final = 16 << 20
"""Longest answer, bytes."""
_PIECE_BYTES: Final = 65_536
_OK: Final = 200


class SourceError(InputError):
    """A source of metrics is not said right."""


class _Timely(io.RawIOBase):
    """Reads a socket, no single wait of which goes beyond the deadline."""

    def __init__(self, link: socket.socket, ends_s: float) -> None:
        self._link, self._ends_s = link, ends_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._link.settimeout(_left_s(self._ends_s))
        return self._link.recv_into(buffer)


class _TimelySocket:
    """What http.client needs of a socket."""

    def __init__(self, link: socket.socket, ends_s: float) -> None:
        self._link, self._ends_s = link, ends_s

    def sendall(self, data: Any) -> None:
        self._link.settimeout(_left_s(self._ends_s))
        self._link.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Timely(self._link, self._ends_s), _PIECE_BYTES)

    def close(self) -> None:
        """Nothing: http.client closes before it has read the body; `get` closes at last."""


def check_url(url: str) -> str:
    """The URL, if it is one that can be read.

    Raises:
        SourceError: it is none, or holds a user's name or password.
    """
    parts = urlsplit(url)
    try:
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise SourceError("metrics", value=url, bound="http://host:port/path or https://...")
    if parts.username is not None or parts.password is not None:
        raise SourceError("metrics", value=parts.hostname, remedy="put secrets into headers")
    return url


def get(url: str, *, headers: Mapping[str, str], timeout_s: float) -> tuple[int, str, bytes]:
    """Status, reason and body of a URL.

    Args:
        url: One that `check_url` has accepted.
        headers: Further headers.
        timeout_s: For all of it, seconds; looking the host's name up may take longer.

    Raises:
        TelemetryUnavailableError: no whole answer in time, none at all, or one that is too long.
    """
    parts = urlsplit(url)
    ends_s = time.monotonic() + timeout_s
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    link = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    opened: socket.socket | None = None
    try:
        link.connect()
        opened = link.sock
        link.sock = _TimelySocket(opened, ends_s)
        link.request("GET", target, headers={"Connection": "close", **headers})
        answer = link.getresponse()
        return answer.status, answer.reason, _body(answer)
    except TimeoutError as error:
        text = f"{place(url)}: no whole answer within {timeout_s:g} s"
        raise TelemetryUnavailableError(Unavailable.TIMEOUT, text) from error
    except OSError as error:
        text = f"{place(url)}: {error.strerror or error}"
        raise TelemetryUnavailableError(Unavailable.UNREACHABLE, text) from error
    except (http.client.HTTPException, ValueError) as error:
        text = f"{place(url)}: no HTTP: {type(error).__name__}: {str(error)[:80]}"
        raise TelemetryUnavailableError(Unavailable.MALFORMED, text) from error
    finally:
        if opened is not None:
            opened.close()


def check_status(url: str, status: int, reason: str) -> None:
    """Refuse an answer that is no success.

    Raises:
        TelemetryUnavailableError: it is none.
    """
    if status != _OK:
        text = f"{place(url)}: HTTP status {status} {reason}".rstrip()
        raise TelemetryUnavailableError(Unavailable.REFUSED, text)


def place(url: str) -> str:
    """The URL without what may be secret."""
    return url.partition("?")[0]


def _body(answer: http.client.HTTPResponse) -> bytes:
    pieces, length = [], 0
    while piece := answer.read1(_PIECE_BYTES):
        length += len(piece)
        if length > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
        pieces.append(piece)
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)
    return b"".join(pieces)


def _left_s(ends_s: float) -> float:
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
