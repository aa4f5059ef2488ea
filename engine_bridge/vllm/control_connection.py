"""One client of the control server: what it has sent, what it has not read, how much it may ask.

It reads and writes nothing itself.
"""

from __future__ import annotations

import selectors
import socket
from typing import Final

IDLE_S: Final = 300.0
"""A connection without a request for so long is closed."""
UNFINISHED_S: Final = 10.0
"""A line must end, and a reply be read, within this time."""
UNAUTHORIZED_S: Final = 5.0
"""A TCP connection must show its token within this time."""

_REQUESTS_PER_S: Final = 1000.0
_BURST: Final = 500.0


class Bucket:
    """A token bucket: so many a second, so many at once."""

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        """Start full."""
        self._per_s, self._burst = per_s, burst
        self._left, self._since_s = burst, now_s

    def spend(self, cost: float, now_s: float) -> None:
        """Take out; it may go below zero, and then needs longer to come back."""
        self._refill(now_s)
        self._left -= cost

    def wait_s(self, now_s: float) -> float:
        """Time until one more may be spent, seconds."""
        self._refill(now_s)
        return max(0.0, (1.0 - self._left) / self._per_s)

    def _refill(self, now_s: float) -> None:
        grown = self._left + (now_s - self._since_s) * self._per_s
        self._left, self._since_s = min(self._burst, grown), now_s


class Connection:
    """One client: what it has sent, what it has not read yet."""

    def __init__(self, link: socket.socket, *, authorized: bool, now_s: float) -> None:
        """Begin with nothing sent.

        Args:
            link: The client's socket, non-blocking.
            authorized: Whether it may ask without showing a token.
            now_s: The time, seconds.
        """
        self.link = link
        self.authorized = authorized
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.opened_s = self.active_s = self.unfinished_s = now_s
        self.bucket = Bucket(_REQUESTS_PER_S, _BURST, now_s)
        self.ending = False
        self.mask = selectors.EVENT_READ

    def deadline_s(self) -> float:
        """When it is closed unless it does something."""
        deadline = self.active_s + IDLE_S
        if self.inbox or self.outbox or self.ending:
            deadline = min(deadline, self.unfinished_s + UNFINISHED_S)
        if not self.authorized:
            deadline = min(deadline, self.opened_s + UNAUTHORIZED_S)
        return deadline
