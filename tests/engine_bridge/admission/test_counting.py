"""Counting prompts with the real tokenizer: the engine's own, or one in a file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine_bridge.admission.rig import CHAT, COMPLETIONS, asked, now
from trimtab.engine_bridge.admission.counting import (
    EngineTokenCounter,
    FileTokenCounter,
    counted,
    given_token_ids,
)
from trimtab.engine_bridge.admission.settings import AdmissionSettingsError


class Engine:
    """Answers questions with the number of their words."""

    def __init__(self, status: int = 200, answer: bytes | None = None) -> None:
        self.status, self.answer = status, answer
        self.asked: list[tuple[str, Any]] = []

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        question = json.loads(body)
        self.asked.append((path, question))
        words = len(json.dumps(question.get("messages", question.get("prompt"))).split())
        return self.status, self.answer or json.dumps({"count": words}).encode()


def count(engine: Engine, path: str, **body: Any) -> int | None:
    return now(EngineTokenCounter(engine.post).count(asked(path=path, body=body)))


def in_order(question: tuple[str, Any]) -> str:
    return json.dumps(question, sort_keys=True)


def test_each_interface_has_its_question() -> None:
    engine = Engine()
    messages = [{"role": "user", "content": "a b"}]
    tools = [{"type": "function"}]
    assert count(engine, COMPLETIONS, model="m", prompt="a b c", max_tokens=5) == 3
    assert count(engine, COMPLETIONS, prompt=["a b c", "d e"]) == 5
    assert count(engine, COMPLETIONS, prompt=[1, 2, 3, 4]) == 4
    assert count(engine, COMPLETIONS, prompt=[[1, 2], [3]]) == 3
    count(engine, CHAT, model="m", messages=messages, tools=tools, stream=True)
    count(engine, f"{CHAT}/batch", messages=[messages, messages])
    count(engine, "/v1/responses", input="a b")
    count(engine, "/v1/messages", model="m", messages=messages, system="s", max_tokens=5)
    assert sorted(engine.asked, key=in_order) == sorted(
        [
            ("/tokenize", {"model": "m", "prompt": "a b c"}),
            ("/tokenize", {"prompt": "a b c"}),
            ("/tokenize", {"prompt": "d e"}),
            ("/tokenize", {"model": "m", "messages": messages, "tools": tools}),
            ("/tokenize", {"messages": messages}),
            ("/tokenize", {"messages": messages}),
            ("/tokenize", {"prompt": "a b"}),
            ("/v1/messages/count_tokens", {"model": "m", "messages": messages, "system": "s"}),
        ],
        key=in_order,
    )


@pytest.mark.parametrize(
    "engine",
    [
        Engine(status=400),
        Engine(answer=b"no json"),
        Engine(answer=b"[]"),
        Engine(answer=b'{"count": "7"}'),
        Engine(answer=b'{"count": -1}'),
    ],
)
def test_an_engine_that_does_not_say(engine: Engine) -> None:
    assert count(engine, COMPLETIONS, prompt="a") is None


def test_a_failing_counter_says_nothing_and_does_no_harm(caplog: Any) -> None:
    async def fail(path: str, body: bytes) -> tuple[int, bytes]:
        raise ConnectionError("refused")

    assert now(counted(EngineTokenCounter(fail), asked(prompt="a"))) is None
    assert "cannot be counted" in caplog.text


def test_token_ids_are_counted_as_they_are() -> None:
    assert given_token_ids({"prompt": [5, 6, 7]}) == 3
    assert given_token_ids({"prompt": [[5], [6, 7]]}) == 3
    assert given_token_ids({"prompt": ["a", "b"]}) == 0
    assert given_token_ids({"prompt": None}) == 0


def test_a_tokenizer_in_a_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "a": 1, "b": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    counter = FileTokenCounter(path)
    assert asyncio.run(counter.count(asked(prompt="a b b"))) == 3
    with pytest.raises(AdmissionSettingsError, match=r"tokenizer\.json"):
        FileTokenCounter(tmp_path / "none.json")
