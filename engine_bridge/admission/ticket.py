"""An admitted request: what was reserved for it, and how it ended.

It settles itself once; what that means for quotas, `core` knows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from trimtab.engine_bridge.admission.bill import Bill
from trimtab.engine_bridge.admission.limiter import Taken
from trimtab.engine_bridge.admission.outcome import Outcome, Used
from trimtab.engine_bridge.vllm.identity import Identity


class Ticket:
    """One admitted request. End it with `finished`, whatever happens; a lost one runs out."""

    __slots__ = ("__weakref__", "_settle", "bill", "identity", "is_open", "started_s", "taken",
                 "text_bytes")  # fmt: skip

    def __init__(
        self,
        *,
        identity: Identity,
        bill: Bill,
        taken: Taken,
        text_bytes: int,
        started_s: float,
        settle: Callable[[Ticket, Used], Awaitable[None]],
    ) -> None:
        """Made by `core` alone."""
        self.identity = identity
        self.bill = bill
        self.taken = taken
        self.text_bytes = text_bytes
        """Bytes of the request; 0 where they say nothing about its tokens."""
        self.started_s = started_s
        self.is_open = True
        """Whether it has not ended yet."""
        self._settle = settle

    @property
    def changes(self) -> Mapping[str, object]:
        """Fields to set in the body before it goes on: bounds that were cut or filled in."""
        return self.bill.changes

    @property
    def prompt_tokens(self) -> int:
        """What was reserved for the prompt, tokens."""
        return self.bill.prompt_tokens

    @property
    def output_tokens(self) -> int:
        """What was reserved for all answers together, tokens."""
        return self.bill.output_tokens

    async def finished(
        self,
        *,
        outcome: Outcome,
        prompt_tokens: int | None = None,
        cached_tokens: int = 0,
        output_tokens: int | None = None,
    ) -> None:
        """Give the place back and replace what was reserved by what was used.

        Only the first call counts. What is None stands as it was reserved if the engine has worked
        on the request (finished, cancelled, failed, timed_out), and is nothing otherwise.

        Args:
            outcome: How it ended.
            prompt_tokens: Tokens of the prompt, as the engine counted them.
            cached_tokens: Those of them that were cached.
            output_tokens: Tokens of all answers; after a disconnect those that were streamed.
        """
        if not self.is_open:
            return
        self.is_open = False
        used = Used(
            outcome=outcome,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
        )
        await self._settle(self, used)
