"""Agent sessions: closed loop, sub-agents, context window, ids that mean something inside only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trimtab.engine_bridge.errors import TraceError
from trimtab.training.traces.describe import describe

from .conftest import Read, Write, request, session

THREE = [
    request(0, 130, 70, [1, 2], think_time=0),
    request(5, 260, 0, [1, 2, 3, 4], stop="end_turn"),
    request(80_000, 400, 9, [1, 2, 3, 4, 5, 6], stop=""),
]


def test_turns_pauses_and_stops(write: Write, read: Read) -> None:
    trace = read(write("trace_1.json", session(THREE)), tier="T1", max_idle_s=500)
    assert trace.tier_names == ("T1",)
    assert trace.turn.tolist() == [0, 1, 2]
    assert trace.session.tolist() == [0, 0, 0]
    assert trace.think_s.tolist() == [0.0, 3.0, 3.0]
    assert [trace.stop_names[k] for k in trace.stop_reason] == ["tool_use", "end_turn", ""]
    assert trace.output_tokens.tolist() == [70, 1, 9]
    assert "1 requests of 0 output tokens" in " ".join(trace.notes)
    assert np.diff(trace.arrival_s).tolist() == pytest.approx([5.0, 5.0])


def test_a_recorded_pause_counts_and_a_missing_one_is_taken_from_the_clock(
    write: Write, read: Read
) -> None:
    second = request(5, 260, 3, [1, 2, 3, 4])
    third = request(80_000, 400, 9, [1, 2, 3, 4, 5])
    del third["think_time"], second["api_time"]
    trace = read(write("t.json", session([THREE[0], second, third])), max_idle_s=500)
    assert trace.think_s.tolist() == [0.0, 3.0, 500.0]
    assert "1 pauses cut to 500 s" in " ".join(trace.notes)


def test_an_answer_that_the_next_turn_repeats_is_named_too(write: Write, read: Read) -> None:
    trace = read(write("t.json", session(THREE)))
    # 130 + 70 tokens fill 3 blocks; 260 + 1 fill 4, all of them the prompt's; the last stays.
    assert np.diff(trace.prefix_offsets).tolist() == [3, 4, 6]
    assert trace.prefix_ids[:3].tolist() == [0, 1, 2]


def test_an_answer_is_not_named_when_the_next_turn_begins_anew(write: Write, read: Read) -> None:
    other = request(5, 260, 3, [1, 8, 9, 10])
    trace = read(write("t.json", session([THREE[0], other])))
    assert np.diff(trace.prefix_offsets).tolist() == [2, 4]


def test_sub_agents_run_in_order_inside_their_session(write: Write, read: Read) -> None:
    nested = {
        "t": 10,
        "type": "subagent",
        "requests": [request(0, 64, 5, [50]), request(4, 128, 5, [50, 51])],
    }
    after = request(30, 200, 5, [1, 2, 3], think_time=28)
    trace = read(write("t.json", session([THREE[0], nested, after])))
    assert trace.turn.tolist() == [0, 1, 2, 3]
    assert trace.prompt_tokens.tolist() == [130, 64, 128, 200]
    # 10 - 2 s after the parent's answer; its own pause; 30 - (10 + 4 + 2) s after the last answer.
    assert trace.think_s.tolist() == [0.0, 8.0, 3.0, 14.0]
    # The parent's answer is repeated by the parent's next turn, not by the sub-agent.
    assert np.diff(trace.prefix_offsets).tolist()[0] == 3
    assert "1 sub-agents" in " ".join(trace.notes)


def test_a_session_ends_where_its_context_outgrows_the_window(write: Write, read: Read) -> None:
    write("d/trace_1.json", session(THREE))
    write("d/trace_2.json.gz", session([request(0, 500, 1, [1])]))
    path = write("d/notes.txt", "not a trace").parent
    trace = read(path, max_context_tokens=300)
    assert trace.prompt_tokens.tolist() == [130, 260]
    notes = " ".join(trace.notes)
    assert "1 sessions end before their first request above 300" in notes
    assert "1 sessions begin above 300 tokens; left out" in notes
    assert "2 requests left out" in notes
    with pytest.raises(TraceError, match="raise --max-context-tokens"):
        read(path, max_context_tokens=100)


def test_ids_are_local_to_a_session(write: Write, read: Read) -> None:
    write("d/trace_1.json", session(THREE))
    path = write("d/trace_2.json", session(THREE)).parent
    trace = read(path)
    of = [
        set(trace.prefix_ids[trace.prefix_offsets[row] : trace.prefix_offsets[row + 1]].tolist())
        for row in range(len(trace))
    ]
    first = set().union(*(of[row] for row in range(6) if trace.session[row] == 0))
    second = set().union(*(of[row] for row in range(6) if trace.session[row] == 1))
    assert not first & second
    assert sorted(first | second) == list(range(12))


def test_starts_are_drawn_with_the_seed(write: Write, read: Read) -> None:
    path = write("t.json", session(THREE))
    starts = {read(path, seed=seed, session_window_s=100).arrival_s[0] for seed in range(5)}
    assert len(starts) == 5
    assert max(starts) < 100


def test_the_real_sessions(shared_dir: Path, read: Read) -> None:
    path = shared_dir / "traces/kv-cache-tester"
    whole = read(path, max_context_tokens=2_000_000)
    # 9,643 requests of the agents themselves and 113 of their sub-agents.
    assert len(whole) == 9643 + 113
    assert len(np.unique(whole.session)) == 180
    assert "12 requests of 0 output tokens" in " ".join(whole.notes)
    assert whole.think_s.max() == 900
    assert describe(whole)["reusable_prompt_share"] == pytest.approx(0.96, abs=0.01)
    named = np.diff(whole.prefix_offsets) * whole.prefix_block_tokens
    assert np.all(named <= whole.prompt_tokens + whole.output_tokens)


def test_some_real_sessions_in_a_context_window(
    shared_dir: Path, tmp_path: Path, read: Read
) -> None:
    for file in sorted((shared_dir / "traces/kv-cache-tester").iterdir())[:25]:
        (tmp_path / file.name).symlink_to(file)
    trace = read(tmp_path)
    assert (trace.prompt_tokens + trace.output_tokens).max() <= 131_072
    assert "sessions end before their first request above 131,072" in " ".join(trace.notes)
