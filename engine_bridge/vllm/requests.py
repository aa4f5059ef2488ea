"""The waiting queue that vLLM's `schedule()` sees: only who joins in this step.

Who that is, the plan has decided before (`ledger`); the queue hands the requests out in that order
and keeps all others out of sight, so that nobody at the head holds up everybody. It orders nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request


class PlannedQueue(RequestQueue):
    """Waiting requests, of which `schedule()` meets those that the plan lets in."""

    def __init__(
        self, on_enter: Callable[[Request], None], on_leave: Callable[[Request], None]
    ) -> None:
        """An empty queue.

        Args:
            on_enter: Told of each request that comes to wait, a preempted one included.
            on_leave: Told of each request that ends while it waits.
        """
        self._on_enter = on_enter
        self._on_leave = on_leave
        self._waiting: dict[str, Request] = {}
        self._planned: deque[Request] = deque()

    def plan(self, requests: Iterable[Request]) -> None:
        """Let these in, in this order, in the step that comes."""
        self._planned.extend(requests)

    def unplan(self) -> list[Request]:
        """Who was let in and did not join."""
        left = list(self._planned)
        self._planned.clear()
        return left

    def get(self, request_id: str) -> Request | None:
        """A waiting request."""
        return self._waiting.get(request_id)

    def add_request(self, request: Request) -> None:
        """A request comes to wait."""
        self._waiting[request.request_id] = request
        self._on_enter(request)

    def prepend_request(self, request: Request) -> None:
        """A request comes back: its place is the plan's business."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Requests that `schedule()` could not take after all; they have never left."""
        for request in requests:
            self._waiting[request.request_id] = request
            self._planned.append(request)

    def peek_request(self) -> Request:
        """Who joins next."""
        return self._planned[0]

    def pop_request(self) -> Request:
        """Who was peeked at joins, or is skipped and comes back by `prepend_requests`."""
        request = self._planned.popleft()
        del self._waiting[request.request_id]
        return request

    def remove_request(self, request: Request) -> None:
        """A request ends while it waits."""
        if self._waiting.pop(request.request_id, None) is not None:
            self._on_leave(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Requests end, some of them while they wait."""
        for request in requests:
            self.remove_request(request)

    def __bool__(self) -> bool:
        """Whether anybody joins in this step."""
        return bool(self._planned)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """All who wait."""
        return iter(list(self._waiting.values()))
