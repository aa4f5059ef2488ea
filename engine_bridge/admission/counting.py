"""Counts the tokens of a prompt with the real tokenizer: the engine's own, or one in a file.

Whether it is worth asking, `core` decides.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from trimtab.engine_bridge.admission.asked import Asked
from trimtab.engine_bridge.admission.settings import AdmissionSettingsError

Post = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""Sends a JSON body to a path of the engine that serves the request; gives status and body."""

_CHAT: Final = frozenset(("/v1/chat/completions", "/v1/chat/completions/batch"))
_MESSAGES: Final = "/v1/messages"
_OK: Final = 200
AT_ONCE: Final = 8
"""Prompts that are counted at once: tokenizing is work for the CPU that serves everybody."""
_LOG: Final = logging.getLogger(__name__)


class TokenCounter(Protocol):
    """Something that knows the model's tokenizer."""

    async def count(self, asked: Asked) -> int | None:
        """Tokens of the prompt, without media; None if it cannot be said."""
        ...


class NoTokenCounter:
    """Nobody who knows."""

    async def count(self, asked: Asked) -> int | None:
        """Never knows."""
        return None


class EngineTokenCounter:
    """Asks the engine itself, at vLLM's `/tokenize`. Nothing reaches its scheduler."""

    def __init__(self, post: Post, turn: asyncio.Semaphore | None = None) -> None:
        """Say how the engine is reached.

        Args:
            post: Asks it.
            turn: What bounds the prompts that are counted at once, where others share it.
        """
        self._post = post
        self._turn = turn or asyncio.Semaphore(AT_ONCE)

    async def count(self, asked: Asked) -> int | None:
        """Tokens of the prompt; None if the engine does not say."""
        total = given_token_ids(asked.body)
        async with self._turn:
            for path, body in _questions(asked):
                status, answer = await self._post(path, json.dumps(body).encode())
                found = _count_in(answer) if status == _OK else None
                if found is None:
                    return None
                total += found
        return total


def _questions(asked: Asked) -> Iterator[tuple[str, Mapping[str, object]]]:
    """What to ask for each prompt in a request."""
    body = asked.body
    model = {"model": asked.model} if asked.model else {}
    if asked.path in _CHAT:
        tools = {"tools": body["tools"]} if body.get("tools") else {}
        messages = body.get("messages")
        several = asked.path.endswith("/batch") and isinstance(messages, list)
        for one in messages if several and isinstance(messages, list) else [messages]:
            yield "/tokenize", {**model, **tools, "messages": one}
    elif asked.path == _MESSAGES:
        fields = ("model", "messages", "system", "tools")
        yield "/v1/messages/count_tokens", {key: body[key] for key in fields if key in body}
    else:
        for text in prompt_texts(body):
            yield "/tokenize", {**model, "prompt": text}


def _count_in(answer: bytes) -> int | None:
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    count = found.get("count", found.get("input_tokens"))
    return count if isinstance(count, int) and count >= 0 else None


class FileTokenCounter:
    """Counts with a `tokenizer.json`, for a gateway that shall not ask its engines.

    Text and the templates' marks are counted apart, so a chat's count is near, not exact.
    """

    def __init__(self, path: Path) -> None:
        """Read the tokenizer.

        Raises:
            AdmissionSettingsError: the library is missing, or the file is no tokenizer.
        """
        try:
            import tokenizers
        except ImportError:
            raise AdmissionSettingsError(
                str(path), remedy="tokenizers is missing: pip install tokenizers"
            ) from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises Exception itself.
            raise AdmissionSettingsError(
                str(path), bound="a tokenizer.json", remedy=str(error)
            ) from None
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def count(self, asked: Asked) -> int | None:
        """Tokens of all texts in the prompt."""
        texts = list(prompt_texts(asked.body))
        async with self._turn:
            counted = await asyncio.to_thread(self._count, texts)
        return counted + given_token_ids(asked.body)

    def _count(self, texts: list[str]) -> int:
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return sum(len(one.ids) for one in encodings)


_PROMPT_FIELDS: Final = ("prompt", "suffix", "system", "instructions", "input", "messages", "tools")


def prompt_texts(body: Mapping[str, object]) -> Iterator[str]:
    """Every text in the fields that become the prompt, with the names of fields in between."""
    for name in _PROMPT_FIELDS:
        waiting = [body.get(name)]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                yield value
            elif isinstance(value, list):
                waiting.extend(value)
            elif isinstance(value, dict):
                waiting.extend(value)
                waiting.extend(value.values())


def given_token_ids(body: Mapping[str, object]) -> int:
    """Tokens that a prompt gives as numbers, in one list or several."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list):
        return 0
    lists = [one for one in prompt if isinstance(one, list)] or [prompt]
    return sum(isinstance(token, int) for one in lists for token in one)


async def counted(counter: TokenCounter, asked: Asked) -> int | None:
    """The counter's word; None, and a line in the log, if it fails."""
    try:
        return await counter.count(asked)
    except Exception as error:
        _LOG.warning("admission: prompts cannot be counted: %s: %s", type(error).__name__, error)
        return None
