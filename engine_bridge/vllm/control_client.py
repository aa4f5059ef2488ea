"""A client of the control socket, for controllers and the command line.

It blocks, at most for its time-out whatever the other side does, and connects again by itself. It
holds no lease alive: whoever sets an allocation renews it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from trimtab.engine_bridge.vllm.control_dial import Dial
from trimtab.engine_bridge.vllm.control_errors import (
    ControlRefusedError,
    ControlSocketError,
    ControlUnavailableError,
)
from trimtab.engine_bridge.vllm.control_protocol import KEY, PROTOCOL
from trimtab.engine_bridge.vllm.control_socket import split_address
from trimtab.engine_bridge.vllm.settings import CONTROL_TOKEN

Answer = dict[str, Any]

_TCP: Final = "tcp://"
_UNIX: Final = "unix:"
_READ_BYTES: Final = 65_536
_MOST_ANSWER_BYTES: Final = 1 << 22


class ControlClient:
    """One engine's control socket. Not safe for several threads at once."""

    def __init__(
        self, address: str | Path, *, token: str | None = None, timeout_s: float = 2.0
    ) -> None:
        """Say where the engine is; nothing is opened yet.

        Args:
            address: Path of a Unix socket (`/run/trimtab.sock`, `unix:...`) or `tcp://host:port`.
            token: For TCP; None: the value of TRIMTAB_CONTROL_TOKEN.
            timeout_s: Longest time that a request takes, with all that it needs, seconds.

        Raises:
            ControlSocketError: the address has no such form.
        """
        text = str(address)
        self._timeout_s = timeout_s
        self._ends_s = 0.0
        self._link: socket.socket | None = None
        self._tcp = Dial(*split_address(text.removeprefix(_TCP))) if text.startswith(_TCP) else None
        self._path = text.removeprefix(_UNIX)
        self._name = text
        self._token = os.environ.get(CONTROL_TOKEN, "") if token is None else token
        if self._tcp is not None and not self._token:
            raise ControlSocketError(
                CONTROL_TOKEN, bound="set for a control socket over TCP", remedy="export it"
            )

    def get(self) -> Answer:
        """What holds: version, allocation by names, state, holder, lease_left_s, limited, plan."""
        return self._ask({"op": "get"})

    def set(
        self,
        values: Mapping[str, object],
        *,
        holder: str,
        ttl_s: float | None = None,
        expected_version: int | None = None,
    ) -> Answer:
        """Make knobs hold and lease them; an empty mapping renews the lease.

        Returns:
            version, changed, allocation by names, lease_left_s, limited.

        Raises:
            ControlRefusedError: the engine keeps what it has; `code` says why.
            ControlUnavailableError: no answer; whether it was applied is not known.
        """
        request: dict[str, object] = {"op": "set", "values": values, "holder": holder}
        if ttl_s is not None:
            request["ttl_s"] = ttl_s
        if expected_version is not None:
            request["expected_version"] = expected_version
        # The same values twice are the same allocation; the same expected version twice is not.
        return self._ask(request, again=expected_version is None)

    def release(self, holder: str) -> Answer:
        """Give the lease back: the static plan holds at once."""
        return self._ask({"op": "release", "holder": holder})

    def health(self) -> Answer:
        """Whether it answers, and the engine's own facts."""
        return self._ask({"op": "health"})

    def telemetry(self) -> Answer | None:
        """The last interval by names; None before the first."""
        found: Answer | None = self._ask({"op": "telemetry"}).get("telemetry")
        return found

    def flush(self) -> Answer:
        """Have the engine write its traffic log out; it does not wait for the writer.

        Returns:
            handed_over_rows, written_rows, dropped_rows, each since the engine's start: all is in
            files once the last two add up to the first.

        Raises:
            ControlRefusedError: the engine keeps no traffic log.
        """
        return self._ask({"op": "flush"})

    def close(self) -> None:
        """Close the connection; the next request opens one again."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def __enter__(self) -> Self:
        """Nothing is opened before the first request."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def _ask(self, request: Mapping[str, object], *, again: bool = True) -> Answer:
        """Send a request; a kept connection that turns out to be dead is opened again once."""
        self._ends_s = time.monotonic() + self._timeout_s
        kept = self._link is not None
        try:
            return self._exchange(request)
        except ControlUnavailableError:
            self.close()
            if not (kept and again) or time.monotonic() >= self._ends_s:
                raise
        return self._exchange(request)

    def _exchange(self, request: Mapping[str, object]) -> Answer:
        if self._link is None:
            self._link = self._connect()
            if self._tcp is not None:
                self._roundtrip({"op": "auth", "token": self._token})
        return self._roundtrip(request)

    def _connect(self) -> socket.socket:
        try:
            if self._tcp is not None:
                link = self._tcp.connect(self._ends_s)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return link
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                link.settimeout(self._left_s())
                link.connect(self._path)
            except OSError:
                link.close()
                raise
            return link
        except OSError as error:
            raise ControlUnavailableError(
                f"{self._name}: cannot connect: {error.strerror or error};"
                " is the engine up, and is this its control socket?"
            ) from error

    def _roundtrip(self, request: Mapping[str, object]) -> Answer:
        link = self._link
        assert link is not None
        line = json.dumps({KEY: PROTOCOL, **request}).encode() + b"\n"
        try:
            link.settimeout(self._left_s())
            link.sendall(line)
            answer = self._read_line(link)
        except TimeoutError as error:
            # A late answer must not be taken for that of the next request.
            self.close()
            raise ControlUnavailableError(
                f"{self._name}: no answer within {self._timeout_s:g} s"
            ) from error
        except OSError as error:
            self.close()
            raise ControlUnavailableError(f"{self._name}: {error.strerror or error}") from error
        return self._judged(answer)

    def _read_line(self, link: socket.socket) -> bytes:
        buffer = bytearray()
        while not buffer.endswith(b"\n"):
            # Each wait anew, or one byte now and then would hold the caller up for ever.
            link.settimeout(self._left_s())
            data = link.recv(_READ_BYTES)
            if not data or len(buffer) > _MOST_ANSWER_BYTES:
                raise ConnectionError("the engine has closed the connection")
            buffer += data
        return bytes(buffer)

    def _left_s(self) -> float:
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s

    def _judged(self, line: bytes) -> Answer:
        try:
            answer = json.loads(line)
            if answer["ok"]:
                return dict(answer)
            code, message = str(answer["error"]["code"]), str(answer["error"]["message"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self.close()
            raise ControlUnavailableError(
                f"{self._name}: what answers there is no Trimtab engine"
            ) from error
        raise ControlRefusedError(code, message)
