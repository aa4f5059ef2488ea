"""The emulated GPU: when steps end, what they cost, what comes out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.step_time import step_ms
from trimtab.engine_bridge.vllm.emulated_device import (
    ACCEPTANCE,
    Answer,
    DeviceStream,
    StepWork,
    accepted_drafts,
    prompt_seed,
)
from trimtab.engine_bridge.vllm.emulated_model import ANSWER_TOKENS, MAX_MODEL_LEN, model_folder


class LateClock:
    """A clock whose sleepers wake up late."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.late_s = late_s
        self.sleeps: list[float] = []

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += max(seconds + self.late_s, 1e-6)

    def stream(self) -> DeviceStream:
        return DeviceStream(now=self.now, sleep=self.sleep)


def test_an_idle_device_starts_at_once_and_a_busy_one_afterwards() -> None:
    clock = LateClock()
    stream = clock.stream()
    assert stream.submit(0.010) == pytest.approx(100.010)
    assert stream.submit(0.005) == pytest.approx(100.015)
    clock.now_s = 100.5
    assert stream.submit(0.010) == pytest.approx(100.510)


def test_the_hosts_time_is_hidden_while_a_step_is_ahead_and_comes_on_top_otherwise() -> None:
    host_s, step_s, steps = 0.004, 0.010, 50
    clock = LateClock()
    stream = clock.stream()
    ends = [stream.submit(step_s)]
    for _ in range(steps):  # asynchronous: the next step is there before this one ends
        clock.now_s += host_s
        ends.append(stream.submit(step_s))
        stream.wait(ends.pop(0))
    stream.wait(ends[0])
    assert clock.now_s - 100.0 == pytest.approx((steps + 1) * step_s, rel=1e-3)

    clock = LateClock()
    stream = clock.stream()
    for _ in range(steps):  # synchronous
        clock.now_s += host_s
        stream.wait(stream.submit(step_s))
    assert clock.now_s - 100.0 == pytest.approx(steps * (step_s + host_s), rel=1e-3)


def test_late_wake_ups_do_not_add_up() -> None:
    clock = LateClock(late_s=1e-3)
    stream = clock.stream()
    ends = [stream.submit(0.010)]
    for _ in range(1000):
        ends.append(stream.submit(0.010))
        stream.wait(ends.pop(0))
    assert clock.now_s - 100.0 == pytest.approx(1000 * 0.010, abs=2e-3)


def test_a_wait_is_slept_but_for_its_end() -> None:
    clock = LateClock()
    stream = clock.stream()
    end_s = stream.submit(0.010)
    assert not stream.ended(end_s)
    stream.wait(end_s)
    assert stream.ended(end_s)
    assert clock.sleeps[0] == pytest.approx(0.010, rel=0.05)
    assert max(clock.sleeps[1:]) < 1e-9


def test_no_time_is_no_wait() -> None:
    clock = LateClock()
    stream = clock.stream()
    stream.wait(stream.submit(0.0))
    assert clock.sleeps == []


def test_a_step_costs_what_the_model_says_of_its_batch() -> None:
    coef = get_engine_spec("h100:llama-3.1-70b-tp8").coef
    work = StepWork()
    work.add(computed=1000, scheduled=1, drafts=0)
    work.add(computed=2000, scheduled=4, drafts=3)
    work.add(computed=512, scheduled=256, drafts=0)
    assert work.duration_ms(coef) == step_ms(
        coef, 261.0, 3.0, 1.0, 256.0, 256 * (512 + 128.0), 2.0, 3000.0
    )


def test_the_last_token_of_a_prompt_is_computed_as_a_decode() -> None:
    work = StepWork()
    work.add(computed=511, scheduled=1, drafts=0)
    assert (work.decodes, work.chunks, work.kv_tokens) == (1, 0, 511)


def test_an_answer_follows_from_its_prompt_and_goes_on_where_it_was() -> None:
    one, again, other = (Answer(prompt_seed(prompt)) for prompt in ([1, 2], [1, 2], [2, 1]))
    whole = [token for _ in range(64) for token in one.take(ANSWER_TOKENS)]
    assert whole == again.peek(ANSWER_TOKENS, 64)
    assert whole != other.peek(ANSWER_TOKENS, 64)
    assert Answer(prompt_seed([1, 2]), given=10).peek(ANSWER_TOKENS, 5) == whole[10:15]
    assert set(whole) <= set(ANSWER_TOKENS)
    assert len(set(whole)) > 48


def test_speculation_changes_the_pace_of_an_answer_not_its_tokens() -> None:
    plain, fast = Answer(7), Answer(7)
    steps = [fast.take(ANSWER_TOKENS, drafts=3) for _ in range(50)]
    assert {len(step) for step in steps} == {1, 2, 3, 4}
    assert [t for step in steps for t in step] == plain.peek(ANSWER_TOKENS, fast.given)


def test_drafts_are_accepted_as_often_as_they_should_be() -> None:
    accepted = [accepted_drafts(seed, place, 3) for seed in range(100) for place in range(100)]
    expected = sum(ACCEPTANCE**k for k in (1, 2, 3))
    # The error of the mean of 10,000 draws is some 0.012.
    assert np.mean(accepted) == pytest.approx(expected, abs=0.05)


def test_the_models_folder_is_made_once(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / "mark").touch()
    assert model_folder(tmp_path) == folder
    assert (folder / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == MAX_MODEL_LEN
    assert config["vocab_size"] == ANSWER_TOKENS.stop


def test_an_answer_encodes_to_its_own_tokens_again(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="it comes with vLLM")
    tokenizer = tokenizers.Tokenizer.from_file(str(model_folder(tmp_path) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == ANSWER_TOKENS.stop
    tokens = Answer(3).peek(ANSWER_TOKENS, 2000)
    text = tokenizer.decode(tokens)
    assert tokenizer.encode(text).ids == tokens
    framed = tokenizer.encode(f"<|user|>hi<|end|><|assistant|>{text}<|end|>").ids
    assert framed[-2001:-1] == tokens


@pytest.mark.parametrize("text", ["Hello, world!", "ünï çödé 你好", "a\n\n\tb", "{'x': 1}"])
def test_any_text_survives_the_tokenizer(tmp_path: Path, text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="it comes with vLLM")
    tokenizer = tokenizers.Tokenizer.from_file(str(model_folder(tmp_path) / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
