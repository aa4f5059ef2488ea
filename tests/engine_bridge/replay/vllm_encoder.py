"""vLLM's scheduler and encoder cache in a few lines, for what media change; KV blocks have no end.

Written after vLLM 0.33 (`Scheduler.schedule`, `_try_schedule_encoder_inputs`,
`_free_encoder_inputs`, `EncoderCacheManager`), not after the replay.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from trimtab.engine_bridge.trace import Trace


class EncoderCache:
    """`EncoderCacheManager`: references by request, unreferenced outputs evicted oldest first."""

    def __init__(self, size: int) -> None:
        self.free = self.freeable_slots = size
        self.users: dict[int, set[int]] = {}
        self.freeable: OrderedDict[int, int] = OrderedDict()

    def check(self, request: Request, content: int, tokens: int) -> bool:
        if content not in self.users:
            return False
        if not self.users[content]:
            self.freeable_slots -= self.freeable.pop(content)
        self.users[content].add(request.row)
        return True

    def can_allocate(self, tokens: int, budget: int, pending: int) -> bool:
        if tokens > budget:
            return False
        tokens += pending
        if tokens > max(self.free, self.freeable_slots):
            return False
        while tokens > self.free:
            content, size = self.freeable.popitem(last=False)
            del self.users[content]
            self.free += size
        return True

    def allocate(self, request: Request, content: int, tokens: int) -> None:
        self.users[content] = {request.row}
        self.free -= tokens
        self.freeable_slots -= tokens

    def release(self, request: Request, content: int, tokens: int) -> None:
        if any(request.items[at][2] == content for at in request.held):
            return
        self.users[content].discard(request.row)
        if not self.users[content]:
            self.freeable[content] = tokens
            self.freeable_slots += tokens


@dataclass
class Request:
    """One request of the trace."""

    row: int
    prompt: int
    output: int
    items: list[tuple[int, int, int]]
    """Start, tokens and content of each."""
    computed: int = 0
    held: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.prompt + self.output - 1


class Scheduler:
    """First come, first served, or by tier; everything has arrived."""

    def __init__(
        self, trace: Trace, *, by_tier: bool, tokens: int, seqs: int, budget: int, cache: int
    ) -> None:
        self.tokens, self.seqs, self.budget = tokens, seqs, budget
        self.encoder = EncoderCache(cache)
        media = trace.media
        self.waiting = [
            Request(
                row,
                int(trace.prompt_tokens[row]),
                int(trace.output_tokens[row]),
                [
                    (int(media.start_tokens[m]), int(media.tokens[m]), int(media.content[m]))
                    for m in range(media.offsets[row], media.offsets[row + 1])
                ],
            )
            for row in range(len(trace))
        ]
        if by_tier:
            self.waiting.sort(key=lambda request: (trace.tier[request.row], request.row))
        self.running: list[Request] = []
        self.encoded: list[int] = []
        self.left_to_encode = budget
        self.starved = False
        """Whether a decode has ever gone without its token, for a prompt that joined before it."""

    def _encode(self, request: Request, chunk: int, budget: int) -> tuple[int, list[int]]:
        """Tokens that are left of a chunk, and the items to encode for it."""
        scheduled: list[int] = []
        contents: list[int] = []
        pending = 0
        for at, (start, tokens, content) in enumerate(request.items):
            if start + tokens <= request.computed:
                continue
            if start >= request.computed + chunk:
                break
            if content in contents:
                request.held.append(at)
                continue
            if self.encoder.check(request, content, tokens):
                if at not in request.held:
                    request.held.append(at)
                continue
            if not self.encoder.can_allocate(tokens, budget - pending, pending):
                chunk = max(0, min(chunk, start - request.computed))
                break
            pending += tokens
            contents.append(content)
            scheduled.append(at)
        return chunk, scheduled

    def _give(self, request: Request, got: dict[int, int]) -> bool:
        """Give a request its chunk of the step, if it gets any."""
        left = self.tokens - sum(got.values())
        chunk = min(max(request.prompt, request.computed + 1) - request.computed, left)
        chunk, new = self._encode(request, chunk, self.left_to_encode)
        if chunk == 0:
            return False
        for at in new:
            _, tokens, content = request.items[at]
            self.encoder.allocate(request, content, tokens)
            request.held.append(at)
            self.left_to_encode -= tokens
            self.encoded.append(content)
        got[request.row] = chunk
        return True

    def step(self) -> dict[int, int]:
        """Schedule and run a step; tokens by row."""
        got: dict[int, int] = {}
        self.encoded, self.left_to_encode = [], self.budget
        for request in self.running:
            if not self._give(request, got) and request.computed >= request.prompt:
                self.starved = True
        for request in list(self.waiting):
            if sum(got.values()) == self.tokens or len(self.running) == self.seqs:
                break
            if self._give(request, got):
                self.waiting.remove(request)
                self.running.append(request)
        for request in list(self.running):
            request.computed += got.get(request.row, 0)
            self._release(request)
            if request.computed >= request.total:
                self.running.remove(request)
        return got

    def _release(self, request: Request) -> None:
        for at in sorted(request.held):
            start, tokens, content = request.items[at]
            if start + tokens <= request.computed:
                request.held.remove(at)
                self.encoder.release(request, content, tokens)
