"""BurstGPT by column names, vidur with and without arrivals."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .conftest import Read, Write

FIRST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
THIRD = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)


def test_failures_are_left_out_and_counted(write: Write, read: Read) -> None:
    rows = (
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,0,0,0,API log\n"
        "46,GPT-4,10,0,10,API log\n"
        "118,GPT-4,417,276,693,Conversation log\n"
    )
    trace = read(write("b.csv", FIRST + rows))
    assert trace.arrival_s.tolist() == [0.0, 113.0]
    assert trace.prompt_tokens.tolist() == [472, 417]
    assert "2 failed requests" in trace.notes[0]


def test_ties_are_spread_over_their_second_in_order(write: Write, read: Read) -> None:
    rows = "".join(f"{t},ChatGPT,{k},1,{k + 1},API log\n" for k, t in enumerate((7, 7, 7, 9), 1))
    trace = read(write("b.csv", FIRST + rows))
    assert np.all(np.diff(trace.arrival_s) > 0)
    assert trace.arrival_s[2] < 1
    assert trace.arrival_s[3] == 2
    assert trace.prompt_tokens.tolist() == [1, 2, 3, 4]
    assert "2 ties" in trace.notes[0]


def test_the_third_release_has_two_columns_more(write: Write, read: Read) -> None:
    rows = (
        "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log\n"
        "19440161.0,,2,ChatGPT,36,29,65,API log\n"
    )
    trace = read(write("b.csv", THIRD + rows))
    assert trace.arrival_s.tolist() == [0.0, 51.0]
    assert trace.prompt_tokens.tolist() == [906, 36]
    assert trace.output_tokens.tolist() == [446, 29]


def test_the_real_samples(shared_dir: Path, read: Read) -> None:
    first = read(shared_dir / "traces/burstgpt/BurstGPT_1.head.csv")
    assert len(first) == 126 - 8
    assert "8 failed requests" in first.notes[0]
    assert len(read(shared_dir / "traces/burstgpt/BurstGPT_3.head.csv")) == 70


def test_lengths_alone_are_a_batch(write: Write, read: Read) -> None:
    text = (
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n10,2,12,5.0\n7,1,8,7.0\n"
    )
    trace = read(write("v.csv", text))
    assert trace.arrival_s.tolist() == [0.0, 0.0]
    assert trace.prompt_tokens.tolist() == [10, 7]
    assert "2 rows arrive together" in trace.notes[0]


def test_real_arrivals_are_those_of_azure(shared_dir: Path, read: Read) -> None:
    one = read(shared_dir / "traces/vidur/splitwise_conv.csv.gz")
    other = read(shared_dir / "traces/azure-2023/AzureLLMInferenceTrace_conv.csv.gz")
    assert np.array_equal(one.prompt_tokens, other.prompt_tokens)
    assert np.allclose(one.arrival_s, other.arrival_s, atol=1e-5)
    name = "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz"
    lengths = read(shared_dir / "traces/vidur" / name)
    assert len(lengths) == 28_257
    assert round(lengths.prompt_tokens.mean()) == 2588
