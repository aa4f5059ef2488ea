"""What an engine's event stream tells the gateway on its way through: the first token, the usage.

It forwards bytes as they came, cut at the ends of events, and takes out only the event that the
gateway itself has asked for. It knows OpenAI's and Anthropic's streams.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

LONGEST_EVENT_BYTES: Final = 8 << 20
"""A longer event is passed on piece by piece, unread."""
_USAGE: Final = b'"usage"'
_ERROR: Final = b'"error"'
_NO_USAGE: Final = (b'"usage":null', b'"usage": null')
_DATA: Final = b"data:"
_DONE: Final = (b"[DONE]\n\n", b"[DONE]\r\n\r\n")
_ENDS: Final = (b"\n\n", b"\r\n\r\n")


@dataclass
class Usage:
    """Tokens as the engine counts them; None: it has not said."""

    prompt_tokens: int | None = None
    cached_tokens: int = 0
    output_tokens: int | None = None

    def take(self, found: object) -> None:
        """Read a `usage` object of either interface."""
        if not isinstance(found, dict):
            return
        prompt = _count(found, "prompt_tokens", "input_tokens")
        output = _count(found, "completion_tokens", "output_tokens")
        details = found.get("prompt_tokens_details") or found.get("input_tokens_details") or {}
        cached = _count(details, "cached_tokens") if isinstance(details, dict) else None
        if cached is None:
            cached = _count(found, "cache_read_input_tokens")
            if prompt is not None:
                # Anthropic's interface leaves out of the input what a cache gave or took.
                prompt += (cached or 0) + (_count(found, "cache_creation_input_tokens") or 0)
        if prompt is not None:
            self.prompt_tokens = prompt
        if output is not None:
            self.output_tokens = output
        if cached is not None:
            self.cached_tokens = cached


class EventStream:
    """One answer's events."""

    def __init__(self, *, strip_usage: bool) -> None:
        """Begin.

        Args:
            strip_usage: Whether to take the event out that holds nothing but usage: the gateway
                has asked for it, not the client.
        """
        self._strip = strip_usage
        self._rest = b""
        self.events = 0
        """Events that held a part of the answer (a last one may be empty): about its tokens, where
        nobody says how many."""
        self._only_tokens = False
        """Whether what follows, up to the end, is tokens: events of OpenAI's older interfaces."""
        self.usage = Usage()
        self.error: dict[str, Any] | None = None
        """The last error that the engine has sent as an event."""

    def feed(self, data: bytes) -> bytes:
        """Take what came; returns what goes on, whole events only."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if not data.endswith(_ENDS):
            data = self._cut(data)
            if not data:
                return b""
        if _USAGE in data or _ERROR in data:
            return self._read(data)
        self.events += self._holding_tokens(data)
        return data

    def rest(self) -> bytes:
        """What came after the last whole event."""
        rest, self._rest = self._rest, b""
        return rest

    def _cut(self, data: bytes) -> bytes:
        """The whole events; the rest is kept."""
        at = max(data.rfind(end) + len(end) if end in data else 0 for end in _ENDS)
        if at == 0 and len(data) > LONGEST_EVENT_BYTES:
            return data
        self._rest = data[at:]
        return data[:at]

    def _read(self, data: bytes) -> bytes:
        """Look into each event that may hold usage or an error."""
        kept = []
        for event in _split(data):
            content = None
            if (_USAGE in event and not any(no in event for no in _NO_USAGE)) or _ERROR in event:
                content = event_json(event)
            if content is None:
                self.events += self._holding_tokens(event)
            elif self._take(content):
                continue
            else:
                self.events += _holds_part(content)
            kept.append(event)
        return b"".join(kept)

    def _holding_tokens(self, data: bytes) -> int:
        """How many of these whole events hold a part of the answer.

        Called for each token, so nothing is parsed once it is known what comes.
        """
        if self._only_tokens and data.startswith(_DATA) and not data.endswith(_DONE):
            return data.count(b"\n\n") or data.count(b"\r\n\r\n")
        found = 0
        for event in _split(data):
            content = event_json(event)
            if content is not None and _holds_part(content):
                found += 1
                self._only_tokens = "type" not in content
        return found

    def _take(self, content: dict[str, Any]) -> bool:
        """Read an event; True: it is to be taken out."""
        for holder in (content, content.get("message"), content.get("response")):
            if isinstance(holder, dict):
                self.usage.take(holder.get("usage"))
        error = content.get("error")
        if isinstance(error, dict):
            self.error = error
        return self._strip and content.get("choices") == [] and bool(content.get("usage"))


def event_json(event: bytes) -> dict[str, Any] | None:
    """The JSON object in an event; None if it holds none."""
    lines = [line[5:] for line in event.splitlines() if line.startswith(_DATA)]
    try:
        content = json.loads(b"\n".join(lines))
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def holds_token(event: bytes) -> bool:
    """Whether an event holds a part of the answer, and not only who speaks.

    In doubt it does: what it says no to is held back.
    """
    content = event_json(event)
    if content is None:
        return b"data:" in event
    if content.get("type") in ("message_start", "ping", "response.created", "response.in_progress"):
        return False
    choices = content.get("choices")
    if not isinstance(choices, list) or not choices:
        return True
    return not all(isinstance(choice, dict) and _says_only_role(choice) for choice in choices)


def _holds_part(content: dict[str, Any]) -> bool:
    """Whether an event's content is a part of the answer; unlike `holds_token` no in doubt."""
    kind = content.get("type")
    if isinstance(kind, str):
        return kind == "content_block_delta" or kind.endswith(".delta")
    choices = content.get("choices")
    if not isinstance(choices, list):
        return False
    return any(isinstance(choice, dict) and _says_something(choice) for choice in choices)


def _says_something(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    said = delta if isinstance(delta, dict) else {"text": choice.get("text")}
    if choice.get("finish_reason") is None and "role" not in said:
        return True  # the text of a token may still be empty: half a character
    return any(value for key, value in said.items() if key != "role")


def _says_only_role(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict) or choice.get("finish_reason") is not None:
        return False
    return not any(value for key, value in delta.items() if key != "role")


def _split(data: bytes) -> list[bytes]:
    """The events with their ends."""
    end = b"\r\n\r\n" if b"\r\n\r\n" in data else b"\n\n"
    parts = data.split(end)
    last = [parts[-1]] if parts[-1] else []
    return [part + end for part in parts[:-1]] + last


def _count(found: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = found.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None
