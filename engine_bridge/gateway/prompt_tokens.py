"""A prompt as token ids: how an engine is asked for them, and prefixes that it has read.

Ids stay the text that they came as: half a million numbers need not become objects to be cut and
sent again. Nothing is sent here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import numpy as np

_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_CHAT_FIELDS: Final = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "chat_template", "chat_template_kwargs",
)  # fmt: skip
"""Fields of a chat that make its prompt and that `/tokenize` takes."""
_TEXT_FIELDS: Final = ("model", "prompt", "add_special_tokens")
_UNKNOWN_PROMPT: Final = (
    "documents", "reasoning_effort", "response_format", "truncate_prompt_tokens", "prompt_embeds",
    "mm_processor_kwargs", "media_io_kwargs",
)  # fmt: skip
"""Fields that change the prompt (some templates'), and that `/tokenize` does not know."""
_UNCACHED: Final = ("prompt_logprobs", "echo")
"""With these an engine reads the whole prompt, whatever is cached."""
_MOST_MARKS: Final = 4096
_PAUSE_S: Final = 300.0
_MARK_BYTES: Final = 16
_TOKENS: Final = re.compile(rb'"tokens"\s*:\s*\[([0-9,\s]+)\]')
_LONGEST: Final = re.compile(rb'"max_model_len"\s*:\s*(\d+)')
_COMMA: Final = ord(",")


class PromptTokens:
    """A prompt's ids as JSON has them, without the brackets."""

    def __init__(self, text: bytes) -> None:
        """Take ids with commas between."""
        self._text = text
        # No text is so long that its places need more bits.
        found = np.flatnonzero(np.frombuffer(text, np.uint8) == _COMMA)
        self._commas = found.astype(np.int32)

    @classmethod
    def of(cls, ids: Sequence[int]) -> Self:
        """Ids as numbers."""
        return cls(json.dumps(ids, separators=(",", ":")).encode()[1:-1])

    @classmethod
    def in_answer(cls, answer: bytes) -> Self | None:
        """Those of an answer of `/tokenize`; None: it has none."""
        found = _TOKENS.search(answer)
        return None if found is None else cls(found[1])

    def __len__(self) -> int:
        """Tokens."""
        return len(self._commas) + 1

    def head(self, tokens: int) -> bytes:
        """The first ids, at least one and not all of them."""
        return self._text[: self._commas[tokens - 1]]

    def marks(self, owner: str, ends: Sequence[int]) -> list[bytes]:
        """A hash of each prefix: equal ones have equal ids, and whose cache they are in."""
        digest = hashlib.blake2b(owner.encode("utf-8", "replace"), digest_size=_MARK_BYTES)
        found, start = [], 0
        for end in ends:
            stop = int(self._commas[end - 1])
            digest.update(self._text[start:stop])
            found.append(digest.copy().digest())
            start = stop
        return found


class ReadPrefixes:
    """Prefixes that an engine has read, the latest ones of them."""

    def __init__(self) -> None:
        """Begin with none."""
        self._marks: OrderedDict[bytes, None] = OrderedDict()
        self.tells = False
        """Whether the engine's answers say how much was cached; without, it is believed to keep
        what it has read."""
        self.longest_tokens: dict[str, int] = {}
        """Longest prompt and answer together that it takes, by model; unknown ones are left out."""
        self._paused_until_s = -math.inf

    def pause(self, now_s: float) -> None:
        """No slices for a while: what they had read was not found."""
        self._paused_until_s = now_s + _PAUSE_S

    def is_paused(self, now_s: float) -> bool:
        """Whether to send it none now."""
        return now_s < self._paused_until_s

    def known(self, marks: Sequence[bytes]) -> int:
        """So many of a prompt's prefixes, from the shortest on, have been read."""
        count = next((at for at, mark in enumerate(marks) if mark not in self._marks), len(marks))
        for mark in marks[:count]:
            self._marks.move_to_end(mark)
        return count

    def add(self, mark: bytes) -> None:
        """One more has been read."""
        self._marks[mark] = None
        if len(self._marks) > _MOST_MARKS:
            self._marks.popitem(last=False)

    def forget(self, marks: Sequence[bytes]) -> None:
        """They are cached no more."""
        for mark in marks:
            self._marks.pop(mark, None)


def question(path: str, body: Mapping[str, Any]) -> Mapping[str, Any] | PromptTokens | None:
    """What to ask `/tokenize` for a request's ids; the ids where it has them itself.

    None: they cannot be had, or are of no use: several prompts, media, a path or a field that
    `/tokenize` does not know, an answer with the prompt's own probabilities, a choice of tools that
    may leave some out of the prompt.
    """
    for name in (*_UNKNOWN_PROMPT, *_UNCACHED):
        value = body.get(name)
        if value is not None and value is not False:
            return None
    if path == _CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(map(_is_text, messages)):
            return None
        if body.get("tools") and body.get("tool_choice") not in (None, "auto"):
            return None
        return {name: body[name] for name in _CHAT_FIELDS if name in body}
    prompt = body.get("prompt") if path == _COMPLETIONS else None
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return {name: body[name] for name in _TEXT_FIELDS if name in body} | {"prompt": prompt}
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return PromptTokens.of(prompt)
    return None


def max_model_len(answer: bytes) -> int | None:
    """Longest prompt and answer together, tokens, by an answer of `/tokenize`; None: unsaid."""
    found = _LONGEST.search(answer)
    return None if found is None else int(found[1])


def answer_tokens(path: str, body: Mapping[str, Any]) -> int:
    """How long an answer the request asks for, tokens; 0: it does not say."""
    names = ("max_completion_tokens", "max_tokens") if path == _CHAT else ("max_tokens",)
    asked = (body.get(name) for name in names)
    return next((found for found in asked if type(found) is int), 0)


def _is_text(message: object) -> bool:
    """Whether a message has no parts but text."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return isinstance(message, dict)
    return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
