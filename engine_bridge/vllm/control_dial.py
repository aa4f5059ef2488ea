"""Connects over TCP within one deadline for all of it: the name's look-up and every address.

A resolver cannot be interrupted, so it is asked in a thread of its own, one at a time.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

Address = tuple[Any, ...]
"""What `socket.getaddrinfo` gives for one address."""
Resolve = Callable[[str, int], list[Address]]


def resolve(host: str, port: int) -> list[Address]:
    """The addresses of a host, as its resolver orders them.

    Raises:
        OSError: the name has none.
    """
    return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))


class Dial:
    """One host and port. Not safe for several threads at once."""

    def __init__(self, host: str, port: int, *, resolver: Resolve = resolve) -> None:
        """Say where; nothing is looked up yet.

        Args:
            host: A name or an address.
            port: TCP port.
            resolver: Finds the addresses; it may hang.
        """
        self._host, self._port, self._resolver = host, port, resolver
        self._under_way: _LookUp | None = None

    def connect(self, ends_s: float) -> socket.socket:
        """A connection to the first address that answers.

        Args:
            ends_s: When to give up, by `time.monotonic`.

        Raises:
            TimeoutError: it is late.
            OSError: the name has no address, or none of them answers.
        """
        addresses = self._addresses(ends_s)
        fault: OSError | None = None
        for number, (family, kind, protocol, _, address) in enumerate(addresses):
            # One that swallows everything leaves the next ones their part.
            share_s = _left_s(ends_s) / (len(addresses) - number)
            try:
                return _connected(socket.socket(family, kind, protocol), address, share_s)
            except OSError as error:
                fault = error
        raise fault or OSError("no address")

    def _addresses(self, ends_s: float) -> list[Address]:
        if self._under_way is None:
            self._under_way = _LookUp(self._resolver, self._host, self._port)
        # One that has not come back is not asked a second time: threads would pile up.
        under_way = self._under_way
        under_way.thread.join(_left_s(ends_s))
        if under_way.thread.is_alive():
            raise TimeoutError(f"the look-up of {self._host} takes too long")
        self._under_way = None
        if isinstance(under_way.found, Exception):
            raise under_way.found
        return under_way.found


class _LookUp:
    """One question to the resolver."""

    def __init__(self, resolver: Resolve, host: str, port: int) -> None:
        self._resolver, self._host, self._port = resolver, host, port
        self.found: list[Address] | Exception = []
        self.thread = threading.Thread(target=self._ask, name="trimtab-look-up", daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        try:
            self.found = self._resolver(self._host, self._port)
        except (OSError, UnicodeError) as error:
            # UnicodeError: a name that no resolver can be asked for.
            self.found = error if isinstance(error, OSError) else OSError(str(error))


def _connected(link: socket.socket, address: Any, timeout_s: float) -> socket.socket:
    try:
        link.settimeout(timeout_s)
        link.connect(address)
    except OSError:
        link.close()
        raise
    return link


def _left_s(ends_s: float) -> float:
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
