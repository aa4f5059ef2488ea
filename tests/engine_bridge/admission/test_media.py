"""What parts that are no text cost: read from their first bytes, decoded never."""

from __future__ import annotations

import base64
import json
import struct
import wave
import zlib
from io import BytesIO
from typing import Any

import pytest

from trimtab.engine_bridge.admission.media import MediaCost, media_cost, without_media
from trimtab.engine_bridge.admission.settings import Media
from trimtab.engine_bridge.encoder_spec import EncoderSpec
from trimtab.engine_bridge.media import AUDIO, IMAGE, VIDEO

MEDIA = Media()


def png(width: int, height: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * (width + 1) * min(height, 4))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def jpeg(width: int, height: int, *, before: int = 100) -> bytes:
    note = b"\xff\xe1" + struct.pack(">H", before + 2) + b"\0" * before
    frame = b"\xff\xc0" + struct.pack(">HBHHB", 11, 8, height, width, 1) + b"\1\x11\0"
    return b"\xff\xd8" + note + frame + b"\xff\xd9"


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\0" * 10


def webp(width: int, height: int) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + sides


def sound(seconds: float, rate: int = 16_000) -> bytes:
    out = BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(b"\0\0" * round(seconds * rate))
    return out.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def cost(*parts: Any) -> MediaCost:
    return media_cost({"messages": [{"role": "user", "content": list(parts)}]}, MEDIA)


def image(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


@pytest.mark.parametrize("kind", [png, jpeg, gif, webp])
@pytest.mark.parametrize(
    ("width", "height", "tiles"), [(1, 1, 1), (512, 512, 1), (513, 512, 2), (1920, 1080, 12)]
)
def test_an_image_costs_its_tiles(kind: Any, width: int, height: int, tiles: int) -> None:
    assert cost(image(url(kind(width, height)))).tokens == tiles * MEDIA.tokens_per_tile


def test_what_is_not_known_costs_the_most() -> None:
    most = MEDIA.most_tiles * MEDIA.tokens_per_tile
    for address in ("https://example.org/cat.png", url(b"no image"), "data:,", "!!!", ""):
        assert cost(image(address)).tokens == most
    assert cost(image(url(png(60_000, 60_000)))).tokens == most


def test_a_small_picture_beside_a_large_one_changes_nothing() -> None:
    """An engine takes one of them; a decoy under a key that it passes over must not be the one."""
    large = "https://example.org/large.png"
    for decoy in ({"data": url(png(9, 9))}, {"source": {"data": url(png(9, 9))}, "url": "x"}):
        assert cost({**image(large), **decoy}).tokens == cost(image(large)).tokens


def test_heads_that_lie_count_as_what_is_not_known() -> None:
    most = MEDIA.most_tiles * MEDIA.tokens_per_tile
    chunk = struct.pack(">I", 8) + b"tEXt" + struct.pack(">II", 1, 1) + b"\0" * 4
    whole = png(60_000, 60_000)
    assert cost(image(url(whole[:8] + chunk + whole[8:]))).tokens == most
    wav = sound(60.0, rate=8000)
    before = b"JUNK" + struct.pack("<I", 16) + struct.pack("<HHIIHH", 1, 99, 2**31, 0, 0, 32)
    packed = wav[:20] + struct.pack("<H", 17) + wav[22:]
    for lie in (wav[:12] + before + wav[12:], packed):
        data = base64.b64encode(lie).decode()
        part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
        assert cost(part).tokens >= 60 * MEDIA.audio_tokens_per_s


def test_a_size_behind_a_thumbnail_is_found() -> None:
    assert cost(image(url(jpeg(512, 512, before=40_000)))).tokens == MEDIA.tokens_per_tile


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": url(png(512, 512))},
        {"image_url": {"url": url(png(512, 512))}},
        {"type": "input_image", "image_url": url(png(512, 512))},
        {
            "type": "image",
            "source": {"type": "base64", "data": base64.b64encode(png(512, 512)).decode()},
        },
    ],
)
def test_every_interfaces_way_to_send_an_image(part: dict[str, Any]) -> None:
    found = cost(part)
    assert found.tokens == MEDIA.tokens_per_tile
    assert found.characters >= len(base64.b64encode(png(512, 512)))


def test_sound_costs_its_seconds() -> None:
    data = base64.b64encode(sound(4.0)).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    assert cost(part).tokens == pytest.approx(4 * MEDIA.audio_tokens_per_s, abs=1)
    compressed = {"type": "audio_url", "audio_url": {"url": url(b"\xff\xf3" * 2000, "audio/mp3")}}
    assert cost(compressed).tokens == pytest.approx(4 * MEDIA.audio_tokens_per_s, abs=1)
    behind = {"type": "audio_url", "audio_url": {"url": "https://example.org/a.wav"}}
    assert cost(behind).tokens == MEDIA.most_audio_s * MEDIA.audio_tokens_per_s


def test_text_beside_an_image_stays_text() -> None:
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}, image(url(png(9, 9)))]},
            {"role": "assistant", "content": "a cat"},
        ]
    }
    assert without_media(body) == {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": "a cat"},
        ]
    }
    assert media_cost({"messages": [{"role": "user", "content": "image_url"}]}, MEDIA).tokens == 0


def test_text_cannot_hide_behind_an_image() -> None:
    """What is beside the image's own address is text and counts as such."""
    hidden = {**image(url(png(9, 9))), "text": "x" * 1000}
    assert cost(hidden).characters == len(url(png(9, 9)))


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "video_url", "video_url": {"url": url(b"no video", "video/mp4")}}, VIDEO),
        ({"video_url": "https://example.org/a.mp4"}, VIDEO),
        ({"type": "audio_url", "audio_url": {"url": url(sound(1.0), "audio/wav")}}, AUDIO),
        ({"audio_url": url(sound(1.0), "audio/wav")}, AUDIO),
        ({"input_audio": {"data": base64.b64encode(sound(1.0)).decode()}}, AUDIO),
        ({"type": "image_url", "image_url": None, "uuid": "cat"}, IMAGE),
        ({"type": "text", "uuid": "cat", "image_url": "https://example.org/cat.png"}, IMAGE),
        ({"type": "image_pil", "image_pil": "x"}, IMAGE),
        ({"type": "input_image", "detail": "auto", "image_url": url(jpeg(9, 9))}, IMAGE),
    ],
)
def test_what_an_encoder_runs_over(part: dict[str, Any], kind: int) -> None:
    found = cost(part)
    assert found.tokens > 0
    assert found.encoded == ((kind, found.tokens),)


@pytest.mark.parametrize("name", ["image_embeds", "audio_embeds", "video_embeds"])
def test_embeddings_cost_tokens_and_no_encoder(name: str) -> None:
    for part in ({"type": name, name: "A" * 4000}, {name: {"x": "A" * 4000}}):
        found = cost(part)
        assert found.tokens > 0
        assert found.encoded == ()


def test_text_stays_text_whatever_key_stands_beside_it() -> None:
    """vLLM goes by the type: a tokenizer must see the text, and no image is paid for."""
    hidden = {"type": "text", "text": "word " * 1000, "image_url": url(png(9, 9))}
    assert cost(hidden) == MediaCost()
    body = {"messages": [{"role": "user", "content": [hidden]}]}
    assert without_media(body) == body
    embedded = {"type": "prompt_embeds", "data": "A" * 4000, "image_url": "x"}
    assert cost(embedded) == MediaCost()


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "long", "image": "x"}]},
        {"messages": [{"role": "user", "type": "image", "content": "long"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "long"}], "video": 1}]},
        {"messages": [], "tools": [{"type": "function", "function": {"a": "long"}, "audio": 1}]},
        {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "content": "long", "image_url": "x"}]}]},
        {"messages": [{"role": "user", "content": [
            {"type": "tool_use", "input": {"a": "long"}, "image_url": "x"}]}]},
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "long", "uuid": "u", "image_url": "x"}]}]},
        {"input": [{"type": "function_call", "arguments": "long", "image": "x"}]},
        {"input": [{"type": ["image"], "content": "long", "image": "x"}]},
    ],
)  # fmt: skip
def test_text_cannot_hide_beside_a_mediums_key(body: dict[str, Any]) -> None:
    """Interfaces pass over keys that they do not know: the text is read, so it must be counted."""
    kept = json.dumps(without_media(body))
    assert "long" in kept
    assert '"x"' not in kept


def test_what_a_tool_answers_may_show_something() -> None:
    shot = {"type": "input_image", "image_url": url(png(600, 300))}
    item = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_text", "text": "see"}, shot],
    }
    body = {"input": [{"role": "user", "content": "go"}, item]}
    assert media_cost(body, MEDIA).tokens == 2 * MEDIA.tokens_per_tile
    kept = without_media(body)["input"]
    assert kept == [body["input"][0], {**item, "output": [{"type": "input_text", "text": "see"}]}]


def test_the_encoders_time_is_that_of_each() -> None:
    encoder = EncoderSpec(kinds=((2.0, 10.0, 0.0), (1.0, 0.0, 1000.0), (0.0, 0.0, 0.0)))
    audio = {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound(4)).decode()}}
    found = cost(image(url(png(512, 512))), audio, image(url(png(513, 512))))
    images = [tokens for kind, tokens in found.encoded if kind == IMAGE]
    assert sorted(images) == [256, 512]
    seconds = next(tokens for kind, tokens in found.encoded if kind == AUDIO)
    assert found.encode_ms(encoder) == pytest.approx(4.0 + 7.68 + 1.0 + seconds**2 / 1e3)
