"""A request as admission sees it: who asks, for what, and how much it could cost at most.

Wrong types that would make the cost unknown are a `BadBodyError`; all others are the engine's to
judge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trimtab.engine_bridge.plan.section import LARGEST_COUNT
from trimtab.engine_bridge.vllm.identity import Identity

_OUTPUT_FIELDS: Final = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/chat/completions/batch": ("max_completion_tokens", "max_tokens"),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
"""Fields that bound an answer, the one that holds first; other paths generate nothing."""
_COMPLETIONS: Final = "/v1/completions"
_TRUE: Final = frozenset(("1", "on", "t", "true", "y", "yes"))
_COMPLETION_TOKENS: Final = 16
"""Length of a completion that says nothing of it, as OpenAI's API has it."""


MOST_LEVELS: Final = 200
"""Levels of lists and objects in a body. Parsers and writers give up at other depths each, so what
is deeper might pass one and break the next."""


class BadBodyError(Exception):
    """A field that the cost depends on is no whole number, or absurd; the text says which."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request, read but not yet judged."""

    identity: Identity
    """Who asks, as the door has found out; what the body says of it is not looked at."""
    path: str
    """The path that the routes see, for instance `/v1/chat/completions`."""
    body: Mapping[str, object]
    """The parsed JSON object."""
    body_bytes: int
    """Length of its JSON text in UTF-8 (or ASCII with escapes): no shorter than what it says."""

    @property
    def model(self) -> str:
        """The model that is asked for; empty where it is left out or no text."""
        model = self.body.get("model")
        return model if isinstance(model, str) else ""


@dataclass(frozen=True, slots=True)
class Answers:
    """How many answers a request asks for, and how long each may get."""

    count: int
    """Answers: prompts x `n`."""
    fields: tuple[str, ...]
    """Fields of the body that may bound an answer, the one that holds first; empty: none comes."""
    longest: int | None
    """Tokens that each may have; None: the request does not say."""


def wants_stream(body: Mapping[str, object]) -> bool:
    """Whether an engine would take it for a request of a stream.

    vLLM reads the field as pydantic reads a bool: a word or a number will do.
    """
    given = body.get("stream")
    if isinstance(given, str):
        return given.lower() in _TRUE
    return isinstance(given, int | float) and given == 1


def answers_of(asked: Asked) -> Answers:
    """Read it from the body.

    Raises:
        BadBodyError: `n` or a bound is no whole number, or too large to be meant.
    """
    fields = _OUTPUT_FIELDS.get(asked.path, ())
    if not fields:
        return Answers(_prompts(asked), (), 0)
    given = [bound for name in fields if (bound := _whole(asked.body, name)) is not None]
    longest = given[0] if given else None
    if longest is None and asked.path == _COMPLETIONS:
        longest = _COMPLETION_TOKENS
    wanted = _whole(asked.body, "n")
    return Answers(_prompts(asked) * max(1, 1 if wanted is None else wanted), fields, longest)


def _whole(body: Mapping[str, object], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_COUNT:
        raise BadBodyError(f"{name} must be a whole number from 0 to {LARGEST_COUNT}")
    return value


def _prompts(asked: Asked) -> int:
    """Prompts in the request: a list of texts or of lists of tokens has several."""
    if asked.path.endswith("/batch"):
        messages = asked.body.get("messages")
        return max(1, len(messages)) if isinstance(messages, list) else 1
    several = asked.body.get("prompt") if asked.path == _COMPLETIONS else None
    if not isinstance(several, list) or not several or isinstance(several[0], int):
        return 1
    return len(several)


def is_too_deep(body: bytes, content: object) -> bool:
    """Whether JSON has more than `MOST_LEVELS` levels.

    Args:
        body: Its text, in any encoding of JSON.
        content: What was read from it.
    """
    if body.count(b"[") + body.count(b"{") <= MOST_LEVELS:
        return False
    level: list[Any] = [content]
    for _ in range(MOST_LEVELS):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, list | dict)
        ]
        if not level:
            return False
    return True


def utf8_bytes(body: bytes) -> int:
    """Length of a JSON text in UTF-8 at most: other encodings are shorter for some scripts."""
    return len(body) if json.detect_encoding(body).startswith("utf-8") else 2 * len(body)
