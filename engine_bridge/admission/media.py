"""What images, sounds and videos in a request cost: prompt tokens, and time to encode them.

Their size is read from the first bytes of what is sent along; nothing is decoded or fetched. Their
bytes are no text: a data URL of a megabyte is not a million tokens. What is a medium, and what is
text, is as vLLM 0.33's `renderers/chat_utils` reads the parts of a message.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from trimtab.engine_bridge.admission.settings import Media
from trimtab.engine_bridge.encoder_spec import EncoderSpec
from trimtab.engine_bridge.media import MEDIA_KINDS

_IMAGE: Final = ("image_url", "input_image", "image", "image_embeds", "image_pil")
_AUDIO: Final = ("input_audio", "audio_url", "audio", "audio_embeds")
_VIDEO: Final = ("video_url", "video", "input_video", "video_embeds")
_KINDS: Final = {
    **dict.fromkeys(_IMAGE, "image"),
    **dict.fromkeys(_AUDIO, "audio"),
    **dict.fromkeys(_VIDEO, "video"),
}
_TEXTS: Final = frozenset(
    ("text", "input_text", "output_text", "refusal", "thinking", "tool_reference", "prompt_embeds")
)
"""Types of parts that are text whatever keys stand beside it; a `uuid` alone makes the keys count.
Embeddings of a prompt count as the text of their bytes, which is more than their tokens."""
_EMBEDDED: Final = "_embeds"
"""Names that end so bring what an encoder would have made: it does not run."""
_PAYLOADS: Final = ("url", "data", "image_url", "source", "file_data")
_NESTED: Final = ("content", "output")
"""Keys below which parts lie: of a message, of a tool's answer."""
_DEEPEST: Final = 4
_HEAD_CHARACTERS: Final = 65_536
"""So much of a payload is looked at: a JPEG has its size behind its thumbnails."""
_NO_SIZE_JPEG: Final = frozenset((0xC4, 0xC8, 0xCC))
_SLOWEST_BYTES_PER_S: Final = 1000.0
"""Compressed sound has no fewer bytes a second (8 kbit/s)."""
_EVEN_WAVES: Final = frozenset((1, 3, 0xFFFE))
"""Forms of a WAVE file whose samples take the bits that its head says: PCM, float, extensible."""


@dataclass(frozen=True, slots=True)
class MediaCost:
    """What a request's parts that are no text cost."""

    tokens: int = 0
    """Prompt tokens."""
    characters: int = 0
    """Length of their payloads, which is no text."""
    encoded: tuple[tuple[int, int], ...] = ()
    """Kind (index into `MEDIA_KINDS`) and tokens of each that an encoder must run over."""

    def encode_ms(self, encoder: EncoderSpec) -> float:
        """Time that an engine's encoders take for all of them, milliseconds."""
        return sum(encoder.item_ms(kind, tokens) for kind, tokens in self.encoded)


def media_cost(body: Mapping[str, object], settings: Media) -> MediaCost:
    """What all parts cost together."""
    tokens, characters, encoded = 0, 0, []
    for part, name in _parts(body):
        kind = _KINDS[name]
        # Which one an engine takes of several is its interface's business: the dearest counts.
        payloads: list[str | None] = [*_payloads(part, 0)] or [None]
        if kind == "image":
            own = max(_image_tokens(payload, settings) for payload in payloads)
        elif kind == "audio":
            own = max(_audio_tokens(payload, settings) for payload in payloads)
        else:
            own = settings.video_tokens
        tokens += own
        characters += max(len(payload or "") for payload in payloads)
        if not name.endswith(_EMBEDDED):
            encoded.append((MEDIA_KINDS.index(kind), own))
    return MediaCost(tokens, characters, tuple(encoded))


def without_media(body: Mapping[str, object]) -> dict[str, object]:
    """The body with text alone, for a tokenizer: nothing in it would be fetched.

    Where it is not sure that vLLM takes a part for a medium, what is not media of it stays, so that
    no text can hide.
    """
    return {key: _without(value, are_parts=False) for key, value in body.items()}


def _without(value: object, *, are_parts: bool) -> object:
    """Messages, their parts, and what tools answered, without the media among them."""
    if not isinstance(value, list):
        return value
    kept: list[object] = []
    for entry in value:
        if not isinstance(entry, dict):
            kept.append(_without(entry, are_parts=are_parts))
            continue
        name = _medium(entry)
        if name is not None and are_parts and entry.get("type") in (None, name):
            continue
        rest = entry
        if name is not None:
            # A message or a tool with a medium's key, or a text that only some interface takes so.
            rest = {key: entry[key] for key in entry if key not in _KINDS and key != "uuid"}
        inner = {key: _without(rest[key], are_parts=True) for key in _NESTED if rest.get(key)}
        kept.append({**rest, **inner})
    return kept


def _parts(body: Mapping[str, object]) -> list[tuple[Mapping[str, object], str]]:
    """Every part that is no text, with the name that tells its kind."""
    found: list[tuple[Mapping[str, object], str]] = []
    waiting = [body.get("messages"), body.get("input"), body.get("prompt"), body.get("system")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(v for v in value if isinstance(v, list | dict))
        elif isinstance(value, dict):
            name = _medium(value)
            if name is not None:
                found.append((value, name))
            waiting.extend(value.get(key) for key in _NESTED)
    return found


def _medium(part: Mapping[str, object]) -> str | None:
    """Its type, or the key that vLLM takes without one; None for text."""
    named = part.get("type")
    if isinstance(named, str) and named in _KINDS:
        return named
    if isinstance(named, str) and named in _TEXTS and part.get("uuid") is None:
        return None
    return next((key for key in _KINDS if key in part), None)


def _payloads(value: object, depth: int) -> Iterator[str]:
    """The texts below a part's payload keys: base64, data URLs, addresses."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and depth <= _DEEPEST:
        for key, inner in value.items():
            if key in _PAYLOADS or key in _KINDS:
                yield from _payloads(inner, depth + 1)


def _head(payload: str | None) -> tuple[bytes, int]:
    """First bytes of a payload and its whole length in bytes; nothing of what lies behind a URL."""
    if payload is None or payload.startswith(("http://", "https://", "file://")):
        return b"", 0
    text = payload
    if payload.startswith("data:"):
        text = payload[payload.find(",", 0, 1024) + 1 :]
    try:
        return base64.b64decode(text[: _HEAD_CHARACTERS // 4 * 4]), len(text) * 3 // 4
    except (binascii.Error, ValueError):
        return b"", 0


def _image_tokens(payload: str | None, settings: Media) -> int:
    size = _image_size(_head(payload)[0])
    tiles = settings.most_tiles
    if size is not None:
        across, down = (math.ceil(side / settings.image_tile_pixels) for side in size)
        tiles = min(tiles, max(1, across * down))
    return tiles * settings.tokens_per_tile


def _image_size(head: bytes) -> tuple[int, int] | None:
    """Width and height, pixels; None for what is no PNG, GIF, JPEG or WebP."""
    if head[:8] == b"\x89PNG\r\n\x1a\n" and head[12:16] == b"IHDR" and len(head) >= 24:
        width, height = struct.unpack(">II", head[16:24])
        return width, height
    if head[:4] == b"GIF8" and len(head) >= 10:
        width, height = struct.unpack("<HH", head[6:10])
        return width, height
    if head[:2] == b"\xff\xd8":
        return _jpeg_size(head)
    if head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X" and len(head) >= 30:
        width, height = (1 + int.from_bytes(head[at : at + 3], "little") for at in (24, 27))
        return width, height
    return None


def _jpeg_size(head: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 <= len(head) and head[at] == 0xFF:
        marker = head[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in _NO_SIZE_JPEG:
            height, width = struct.unpack(">HH", head[at + 5 : at + 9])
            return width, height
        at += 2 + int.from_bytes(head[at + 2 : at + 4], "big")
    return None


def _audio_tokens(payload: str | None, settings: Media) -> int:
    head, length = _head(payload)
    seconds = settings.most_audio_s
    if length:
        bytes_per_s = _SLOWEST_BYTES_PER_S
        if head[:4] == b"RIFF" and head[8:16] == b"WAVEfmt " and len(head) >= 36:
            form, channels, rate, _, _, bits = struct.unpack("<HHIIHH", head[20:36])
            if form in _EVEN_WAVES:
                bytes_per_s = max(_SLOWEST_BYTES_PER_S, rate * channels * bits / 8)
        seconds = min(seconds, length / bytes_per_s)
    return math.ceil(seconds * settings.audio_tokens_per_s)
