"""What the emulated GPU does: when its steps end, what they cost and which tokens come out.

It knows nothing of vLLM (`executor` is the part that vLLM talks to) and draws no random numbers:
equal prompts give equal answers.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from trimtab.engine_bridge.step_time import CoefArray, step_ms

ACCEPTANCE: Final = 0.7
"""Probability that a draft token is accepted, each given that the one before it was."""

_SPIN_S: Final = 2e-4
"""The end of a wait that is polled: the kernel may wake a sleeper this late."""
_MASK: Final = (1 << 64) - 1
_ACCEPT_SALT: Final = 0x5851F42D4C957F2D


class DeviceStream:
    """Work that a device does in order, one piece after the other, while the host goes on.

    A piece starts when it is submitted or when the piece before it ends, whichever is later, as on
    a CUDA stream. So in asynchronous scheduling step n + 1 starts the moment step n ends, and the
    scheduler's own time is hidden; in synchronous scheduling the device idles for that long. Ends
    are absolute times, so a late wake-up moves no later step.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start idle.

        Args:
            now: Clock, seconds.
            sleep: Lets that many seconds pass; may be late.
        """
        self._now = now
        self._sleep = sleep
        self._free_s = now()

    def submit(self, duration_s: float) -> float:
        """Queue a piece of work.

        Returns:
            When it ends, on the stream's clock, seconds.
        """
        self._free_s = max(self._free_s, self._now()) + duration_s
        return self._free_s

    def wait(self, end_s: float) -> None:
        """Return once the clock has reached `end_s`: sleeps, then polls."""
        while (left_s := end_s - self._now()) > 0.0:
            self._sleep(left_s - _SPIN_S if left_s > _SPIN_S else 0.0)

    def ended(self, end_s: float) -> bool:
        """Whether the clock has reached `end_s`."""
        return self._now() >= end_s


@dataclass
class StepWork:
    """What one step computes, summed over its requests, as `step_time.step_ms` wants it."""

    tokens: int = 0
    sequences: int = 0
    chunks: int = 0
    chunk_tokens: int = 0
    pairs: float = 0.0
    decodes: int = 0
    kv_tokens: int = 0

    def add(self, *, computed: int, scheduled: int, drafts: int) -> None:
        """Count one request.

        Args:
            computed: Its tokens in the KV cache before the step.
            scheduled: Its tokens in the step.
            drafts: How many of those are draft tokens. One token beside them is a decode, as it is
                for the GPU's kernels, even if it is the last one of a prompt.
        """
        self.tokens += scheduled
        self.sequences += 1
        if scheduled == 1 + drafts:
            self.decodes += 1
            self.kv_tokens += computed
        else:
            self.chunks += 1
            self.chunk_tokens += scheduled
            self.pairs += scheduled * (computed + 0.5 * scheduled)

    def duration_ms(self, coef: CoefArray) -> float:
        """How long the step takes, milliseconds.

        Args:
            coef: coefficient vector, float64, shape (COEF_LEN,).
        """
        return step_ms(
            coef,
            float(self.tokens),
            float(self.sequences),
            float(self.chunks),
            float(self.chunk_tokens),
            self.pairs,
            float(self.decodes),
            float(self.kv_tokens),
        )


@dataclass
class Answer:
    """The endless answer to one prompt: a function of the prompt and the place alone."""

    seed: int
    """What the tokens follow from: a checksum of the prompt."""
    given: int = 0
    """Tokens of the answer so far."""

    def take(self, vocabulary: range, *, drafts: int = 0) -> list[int]:
        """The tokens of one step: accepted drafts and one more.

        Args:
            vocabulary: Token ids that may come out.
            drafts: Draft tokens that the step verified.
        """
        accepted = accepted_drafts(self.seed, self.given, drafts)
        tokens = self.peek(vocabulary, 1 + accepted)
        self.given += len(tokens)
        return tokens

    def peek(self, vocabulary: range, count: int) -> list[int]:
        """The next `count` tokens, which stay to be given: what a drafter would propose."""
        size = len(vocabulary)
        return [
            vocabulary[_mixed(self.seed, place) % size]
            for place in range(self.given, self.given + count)
        ]


def prompt_seed(token_ids: Sequence[int]) -> int:
    """Checksum of a prompt's token ids."""
    return zlib.crc32(array("Q", token_ids).tobytes())


def accepted_drafts(seed: int, place: int, drafts: int) -> int:
    """How many of a step's draft tokens are accepted: those before the first refusal."""
    for accepted in range(drafts):
        if _mixed(seed ^ _ACCEPT_SALT, place + accepted) >= ACCEPTANCE * (_MASK + 1):
            return accepted
    return drafts


def _mixed(seed: int, place: int) -> int:
    """64 well-mixed bits (the finaliser of SplitMix64, Steele, Lea and Flood, 2014)."""
    bits = (seed * 0xD1342543DE82EF95 + place * 0x9E3779B97F4A7C15) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)
