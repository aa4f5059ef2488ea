"""The emulated executor behind vLLM's interface: tokens, drafts, grammars, time, memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="the executor derives from vLLM's")

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from trimtab.engine_bridge.encoder_spec import EncoderFile, EncoderKindFile
from trimtab.engine_bridge.engine_file import write_engine_file
from trimtab.engine_bridge.engine_spec import find_engine_file, get_engine_spec
from trimtab.engine_bridge.vllm import EMULATE, emulated_platform, executor
from trimtab.engine_bridge.vllm.emulated_device import DeviceStream, StepWork

ENGINE = "h100:llama-3.1-8b-tp1"
PROMPT = list(range(100))


class Clock:
    """A clock that moves when somebody sleeps on it."""

    now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 1e-6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(
        executor, "DeviceStream", lambda: DeviceStream(now=clock.now, sleep=clock.sleep)
    )
    return clock


def emulated(
    *, drafts: int = 0, block_size: int = 16, time_scale: float = 1.0, engine: str = ENGINE
) -> Any:
    speculative = SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
    section = {"engine": engine, "emulate": True, "time_scale": time_scale}
    config = SimpleNamespace(
        additional_config={"trimtab": section},
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        cache_config=SimpleNamespace(block_size=block_size, kv_cache_layout=None),
        speculative_config=speculative,
    )
    for name in (
        *("lora_config", "load_config", "parallel_config", "scheduler_config"),
        *("device_config", "observability_config"),
    ):
        setattr(config, name, None)
    return executor.EmulatedExecutor(config)


def new(req_id: str, *, prompt: list[int] = PROMPT, computed: int = 0, **more: Any) -> Any:
    params = SamplingParams(logprobs=more.pop("logprobs", None))
    media = more.pop("media", [])
    return NewRequestData(req_id, prompt, media, params, None, ([1],), computed, None, **more)


def step(
    scheduled: dict[str, int],
    *,
    new_reqs: list[Any] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    resumed: set[str] | None = None,
    drafts: dict[str, list[int]] | None = None,
    finished: set[str] | None = None,
    encoded: dict[str, list[int]] | None = None,
) -> SchedulerOutput:
    """A step; `cached` is computed tokens and output tokens by request."""
    cached = cached or {}
    requests = CachedRequestData(
        req_ids=list(cached),
        resumed_req_ids=resumed or set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * len(cached),
        num_computed_tokens=[computed for computed, _ in cached.values()],
        num_output_tokens=[given for _, given in cached.values()],
    )
    fields: dict[str, Any] = {
        "scheduled_new_reqs": new_reqs or [],
        "scheduled_cached_reqs": requests,
        "num_scheduled_tokens": scheduled,
        "total_num_scheduled_tokens": sum(scheduled.values()),
        "scheduled_spec_decode_tokens": drafts or {},
        "scheduled_encoder_inputs": encoded or {},
        "finished_req_ids": finished or set(),
        "free_encoder_mm_hashes": [],
    }
    if "num_common_prefix_blocks" in SchedulerOutput.__dataclass_fields__:  # vLLM 0.32
        fields["num_common_prefix_blocks"] = []
    return SchedulerOutput(**fields)


def run(engine: Any, output: SchedulerOutput, grammar: Any = None) -> dict[str, list[int]]:
    """One synchronous step, as vLLM's engine core does it; tokens by request."""
    result = engine.execute_model(output, non_block=True).result()
    if result is None:
        result = engine.sample_tokens(grammar)
    return {req_id: result.sampled_token_ids[row] for req_id, row in result.req_id_to_index.items()}


def answer(engine: Any, req_id: str, count: int, *, prompt: list[int] = PROMPT) -> list[int]:
    """The first tokens of an undisturbed request."""
    tokens = run(engine, step({req_id: len(prompt)}, new_reqs=[new(req_id, prompt=prompt)]))[req_id]
    for given in range(1, count):
        at = len(prompt) + given - 1
        tokens += run(engine, step({req_id: 1}, cached={req_id: (at, given)}))[req_id]
    return tokens


def test_a_token_comes_when_the_prompt_is_complete_and_not_before(clock: Clock) -> None:
    engine = emulated()
    assert run(engine, step({"a": 60}, new_reqs=[new("a")])) == {"a": []}
    assert run(engine, step({"a": 39}, cached={"a": (60, 0)})) == {"a": []}
    assert len(run(engine, step({"a": 1}, cached={"a": (99, 0)}))["a"]) == 1
    assert len(run(engine, step({"a": 1}, cached={"a": (100, 1)}))["a"]) == 1


def test_a_cached_prefix_counts_as_computed(clock: Clock) -> None:
    assert len(run(emulated(), step({"a": 4}, new_reqs=[new("a", computed=96)]))["a"]) == 1


def test_requests_of_one_step_do_not_mix(clock: Clock) -> None:
    engine = emulated()
    want = answer(engine, "x", 3)
    run(engine, step({"a": 100, "b": 50}, new_reqs=[new("a"), new("b", prompt=[7] * 200)]))
    tokens = run(engine, step({"b": 100, "a": 1}, cached={"b": (50, 0), "a": (100, 1)}))
    assert tokens == {"b": [], "a": [want[1]]}


def test_a_preempted_request_computes_its_answer_again_without_a_token_and_goes_on(
    clock: Clock,
) -> None:
    engine = emulated()
    want = answer(engine, "x", 8)
    assert answer(engine, "a", 5) == want[:5]
    resumed = {"resumed": {"a"}}
    assert run(engine, step({"a": 90}, cached={"a": (0, 5)}, **resumed)) == {"a": []}
    assert run(engine, step({"a": 15}, cached={"a": (90, 5)})) == {"a": [want[5]]}


def test_what_was_under_way_at_a_preemption_is_given_again(clock: Clock) -> None:
    engine = emulated()
    want = answer(engine, "x", 6)
    answer(engine, "a", 5)  # the scheduler threw the fifth token away
    tokens = run(engine, step({"a": 104}, cached={"a": (0, 4)}, resumed={"a"}))
    assert tokens == {"a": [want[4]]}


def test_the_second_model_runners_form_of_a_resumed_request_is_understood(clock: Clock) -> None:
    engine = emulated()
    want = answer(engine, "x", 6)
    answer(engine, "a", 5)
    again = new("a", prefill_token_ids=[*PROMPT, *want[:5]])
    assert run(engine, step({"a": 100}, new_reqs=[again])) == {"a": []}
    assert run(engine, step({"a": 5}, cached={"a": (100, 5)})) == {"a": [want[5]]}


def test_a_finished_request_is_forgotten_and_its_name_free(clock: Clock) -> None:
    engine = emulated()
    want = answer(engine, "a", 3)
    assert answer(engine, "b", 1) == want[:1]
    fresh = step({"a": 100}, new_reqs=[new("a")], finished={"a", "b", "never seen"})
    assert run(engine, fresh) == {"a": want[:1]}
    assert set(engine._requests) == {"a"}


@pytest.mark.parametrize("non_block", [True, False])
def test_a_step_of_no_tokens_is_empty_and_takes_no_time(clock: Clock, non_block: bool) -> None:
    engine = emulated()
    answer(engine, "a", 1)
    before_s = clock.now_s
    result = engine.execute_model(step({}, finished={"a"}), non_block=non_block)
    output = result.result() if non_block else result
    assert output.req_ids == []
    assert clock.now_s == before_s
    assert engine._requests == {}


def test_a_step_takes_as_long_as_the_model_says(clock: Clock) -> None:
    engine = emulated(time_scale=2.0)
    work = StepWork(tokens=100, sequences=1, chunks=1, chunk_tokens=100, pairs=5000.0)
    expected_s = 2e-3 * work.duration_ms(get_engine_spec(ENGINE).coef)
    run(engine, step({"a": 100}, new_reqs=[new("a")]))
    assert clock.now_s == pytest.approx(expected_s, abs=2e-6)


def test_a_step_that_encodes_takes_as_much_longer(clock: Clock, tmp_path: Path) -> None:
    encoder = EncoderFile(
        image=EncoderKindFile(item_ms=2.0, us_per_token=50.0), audio=EncoderKindFile(item_ms=7.0)
    )
    path = tmp_path / "engine.yaml"
    write_engine_file(find_engine_file(ENGINE).model_copy(update={"encoder": encoder}), path)
    media = [
        MultiModalFeatureSpec(None, modality, modality, PlaceholderRange(offset=at, length=20))
        for modality, at in (("image", 10), ("audio", 40), ("pointcloud", 70))
    ]
    took_s = []
    for engine in (ENGINE, str(path)):
        device, start_s = emulated(engine=engine), clock.now_s
        run(device, step({"a": 60}, new_reqs=[new("a", media=media)], encoded={"a": [0, 1]}))
        run(device, step({"a": 40}, cached={"a": (60, 0)}, encoded={"a": [2]}))
        took_s.append(clock.now_s - start_s)
    # A modality that is none of ours costs what an image does.
    assert took_s[1] - took_s[0] == pytest.approx(3e-3 + 7e-3 + 3e-3, abs=4e-6)


def test_steps_may_take_no_time(clock: Clock) -> None:
    answer(emulated(time_scale=0.0), "a", 50)
    assert clock.now_s == 0.0


def test_asynchronous_steps_wait_for_their_turn_only(clock: Clock) -> None:
    engine = emulated()
    futures = []
    for output in (
        step({"a": 100}, new_reqs=[new("a")]),
        step({"a": 1}, cached={"a": (100, 1)}),
        step({"a": 1}, cached={"a": (101, 2)}),
    ):
        assert engine.execute_model(output, non_block=True).result() is None
        futures.append(engine.sample_tokens(None, non_block=True))
    assert clock.now_s == 0.0
    assert [future.done() for future in futures] == [False] * 3
    ends = []
    tokens = []
    for future in futures:
        tokens += future.result().sampled_token_ids[0]
        ends.append(clock.now_s)
    assert 0.0 < ends[0] < ends[1] < ends[2]
    assert all(future.done() for future in futures)
    assert tokens == answer(engine, "b", 3)


def test_speculation_gives_one_token_more_than_was_accepted(clock: Clock) -> None:
    engine = emulated(drafts=3)
    want = answer(engine, "x", 40)
    got = run(engine, step({"a": 100}, new_reqs=[new("a")]))["a"]
    lengths = set()
    while len(got) < 36:
        proposed = engine.take_draft_token_ids()
        assert (proposed.req_ids, len(proposed.draft_token_ids[0])) == (["a"], 3)
        output = step(
            {"a": 4},
            cached={"a": (99 + len(got), len(got))},
            drafts={"a": proposed.draft_token_ids[0]},
        )
        tokens = run(engine, output)["a"]
        assert tokens[:-1] == proposed.draft_token_ids[0][: len(tokens) - 1]
        lengths.add(len(tokens))
        got += tokens
    assert got[:40] == want[: len(got)]
    assert lengths == {1, 2, 3, 4}


def test_drafts_are_taken_once_and_only_proposed_for_requests_that_go_on(clock: Clock) -> None:
    engine = emulated(drafts=2)
    run(engine, step({"a": 100, "b": 50}, new_reqs=[new("a"), new("b")]))
    assert engine.take_draft_token_ids().req_ids == ["a"]
    assert engine.take_draft_token_ids() is None
    plain = emulated()
    run(plain, step({"a": 100}, new_reqs=[new("a")]))
    assert plain.take_draft_token_ids() is None


def test_a_grammars_tokens_are_kept_to(clock: Clock) -> None:
    engine = emulated(drafts=1)
    run(engine, step({"a": 100, "b": 100}, new_reqs=[new("a"), new("b")]))
    bitmask = np.zeros((3, 4), np.int32)
    bitmask[0, 1] = 0b100  # a: token 34 alone; its row for the draft comes next
    bitmask[1] = -1
    bitmask[2, 3] = 0b11000  # b: 99 or 100
    grammar = SimpleNamespace(structured_output_request_ids=["a", "b"], grammar_bitmask=bitmask)
    output = step({"a": 2, "b": 1}, cached={"a": (100, 1), "b": (100, 1)}, drafts={"a": [5]})
    tokens = run(engine, output, grammar)
    assert tokens["a"] == [34]
    assert tokens["b"][0] in (99, 100)
    assert len(tokens["b"]) == 1


def test_logprobs_line_up_with_the_tokens_of_each_request(clock: Clock) -> None:
    engine = emulated()
    output = step(
        {"a": 100, "b": 10, "c": 100},
        new_reqs=[new("a", logprobs=2), new("b", logprobs=0), new("c")],
    )
    engine.execute_model(output)
    result = engine.sample_tokens(None)
    for row, tokens in enumerate(result.sampled_token_ids):
        found = result.logprobs.slice_request(row, len(tokens))
        assert found.logprob_token_ids[:, 0].tolist() == tokens
        assert found.logprobs.shape == (len(tokens), 3)
        assert np.isfinite(found.logprobs).all()


@pytest.mark.parametrize("block_size", [16, 32])
def test_the_memory_is_that_of_the_engines_blocks(clock: Clock, block_size: int) -> None:
    engine = emulated(block_size=block_size)
    (layers,) = engine.get_kv_cache_specs()
    (layer,) = layers.values()
    (memory,) = engine.determine_available_memory()
    assert memory // layer.page_size_bytes == get_engine_spec(ENGINE).kv_tokens // block_size
    assert memory % layer.page_size_bytes == 0


@pytest.mark.parametrize("more", [(), (1,)])
def test_the_layout_is_noted_in_both_versions_forms(clock: Clock, more: tuple[int, ...]) -> None:
    engine = emulated()
    ((layout,),) = engine.get_supported_kv_cache_layouts()
    engine.set_kv_cache_layout(layout, *more)
    assert engine.cache_config.kv_cache_layout == layout


def test_vllm_may_schedule_asynchronously(clock: Clock) -> None:
    assert executor.EmulatedExecutor.supports_async_scheduling()


def test_the_platform_is_vllms_choice_only_where_emulation_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in ("", "0", "true"):
        monkeypatch.setenv(EMULATE, value)
        assert emulated_platform() is None
    monkeypatch.delenv(EMULATE)
    assert emulated_platform() is None
    monkeypatch.setenv(EMULATE, "1")
    name = emulated_platform()
    assert name is not None
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert resolve_obj_by_qualname(name).device_type == "cpu"
