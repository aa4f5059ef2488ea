"""The beginning of a prompt, by which requests with a common prefix are told.

A conversation counts up to its first user message: what follows differs from turn to turn, and its
turns should stay together. It tokenises nothing and checks nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

_KEY_BYTES: Final = 16
_USER: Final = "user"


def affinity_key(tenant: str, body: Mapping[str, Any], prefix_bytes: int) -> bytes:
    """What requests have in common that should go to the same engine, 16 bytes.

    Args:
        tenant: Whose it is. Tenants share no cached blocks.
        body: The request, as OpenAI's or Anthropic's interface has it.
        prefix_bytes: Longest part of the prompt that counts.
    """
    digest = hashlib.blake2b(tenant.encode("utf-8", "replace"), digest_size=_KEY_BYTES)
    left = prefix_bytes
    for part in _head(body):
        if left <= 0:
            break
        # Four bytes at most a character: no more text than needed is encoded.
        piece = part[:left].encode("utf-8", "surrogatepass")[:left]
        digest.update(b"\0" + piece)
        left -= len(piece)
    return digest.digest()


def _head(body: Mapping[str, Any]) -> Iterator[str]:
    if "system" in body:
        yield from _texts(body["system"])
    for name in ("messages", "prompt", "input"):
        if name in body:
            content = body[name]
            yield from _conversation(content) if _is_conversation(content) else _texts(content)
            return


def _is_conversation(content: object) -> bool:
    return isinstance(content, list) and bool(content) and isinstance(content[0], dict)


def _conversation(messages: list[Any]) -> Iterator[str]:
    for message in messages:
        if not isinstance(message, dict):
            return
        yield str(message.get("role", ""))
        yield from _texts(message.get("content"))
        if message.get("role") == _USER:
            return


def _texts(content: object) -> Iterator[str]:
    """The texts in a prompt: text, a list of texts, of parts with text, or of token ids."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, str):
                yield part
            elif isinstance(part, int):
                yield f"{part} "
            elif isinstance(part, list):
                yield from (f"{token} " for token in part if isinstance(token, int))
            elif isinstance(part, dict):
                yield from _part(part)


def _part(part: dict[str, Any]) -> Iterator[str]:
    text = part.get("text")
    if isinstance(text, str):
        yield text
        return
    # An image, a sound: where it is, or its data.
    for value in part.values():
        inner = value.get("url") or value.get("data") if isinstance(value, dict) else value
        if isinstance(inner, str):
            yield inner
