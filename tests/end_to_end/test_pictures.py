"""Requests with pictures through a real server: answered, scheduled, logged and counted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx", reason="it comes with vLLM")
pytest.importorskip("PIL", reason="it comes with vLLM")
import httpx
import pyarrow.parquet as pq

from tests.end_to_end.picture_model import IMAGE_TOKENS, make_model, picture
from tests.vllm_server import ENGINE, MODEL, Server, running
from trimtab.engine_bridge.encoder_spec import EncoderFile, EncoderKindFile
from trimtab.engine_bridge.engine_file import write_engine_file
from trimtab.engine_bridge.engine_spec import find_engine_file
from trimtab.engine_bridge.vllm.control_client import ControlClient

pytestmark = pytest.mark.slow
COLOURS = ("red", "green", "blue")
ITEM_MS = 60.0
TOKENS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """The emulated executor under vLLM's own reading of images."""
    make_model(folder / "model")
    encoder = EncoderFile(image=EncoderKindFile(item_ms=ITEM_MS))
    engine = find_engine_file(ENGINE).model_copy(update={"encoder": encoder})
    write_engine_file(engine, folder / "engine.yaml")
    with running(
        folder,
        *("--distributed-executor-backend", "trimtab.engine_bridge.vllm.executor.EmulatedExecutor"),
        *("--served-model-name", MODEL, "--max-model-len", "4096"),
        serves=(str(folder / "model"), "--engine", str(folder / "engine.yaml")),
        env={"TRIMTAB_EMULATE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    ) as started:
        yield started
    check_logs(folder)


def ask(server: Server, colour: str | None) -> dict[str, Any]:
    shown = [] if colour is None else [picture(colour)]
    parts = [*shown, {"type": "text", "text": "what is this"}]
    body = {"model": MODEL, "max_tokens": TOKENS, "messages": [{"role": "user", "content": parts}]}
    url, head = f"{server.url}/v1/chat/completions", server.bearer("acme")
    answer = httpx.post(url, json=body, headers=head, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["usage"])


def encoded(server: Server) -> float:
    page = httpx.get(f"{server.url}/metrics", timeout=30).text
    found = re.search(r'^trimtab_encoded_tokens_total\{.*kind="image".*\} (\S+)', page, re.M)
    assert found is not None
    return float(found[1])


def test_pictures_are_answered_and_each_is_encoded_once(server: Server) -> None:
    words = ask(server, None)["prompt_tokens"]
    with ThreadPoolExecutor(12) as clients:
        usage = list(clients.map(lambda n: ask(server, COLOURS[n % len(COLOURS)]), range(12)))
    assert {one["prompt_tokens"] for one in usage} == {words + IMAGE_TOKENS}
    assert {one["completion_tokens"] for one in usage} == {TOKENS}
    # The encoder cache holds the three of them; nobody has them encoded again.
    assert encoded(server) == len(COLOURS) * IMAGE_TOKENS
    with ControlClient(server.folder / "control.sock") as control:
        health = control.health()["engine"]
    assert health["free_blocks"] == health["blocks"]


def check_logs(folder: Path) -> None:
    """After the server's end: what was shown is in the logs, as it was, and what it took."""
    requests = pq.read_table(folder / "traffic").to_pylist()
    media = sorted(str(item) for row in requests for item in row["media"])
    assert len(requests) == 13
    assert len(media) == 12
    assert all(re.fullmatch(rf"image:{IMAGE_TOKENS}@0#\d+", item) for item in media)
    assert [media.count(item) for item in sorted(set(media))] == [4, 4, 4]
    steps = pq.read_table(folder / "steps").to_pylist()
    assert sum(row["image_items"] for row in steps) == len(COLOURS)
    for row in steps:
        assert row["step_ms"] >= ITEM_MS * row["image_items"]
