"""ServeGen's clients: drawn requests keep rates, burstiness, lengths and silence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trimtab.engine_bridge.errors import TraceError
from trimtab.training.traces.servegen_client import length_table

from .conftest import Read, Write

IDLE = "{start},0,0,,0,0"
LENGTHS = (
    '{"0": {"input_tokens": "{}", "output_tokens": "{}"},'
    ' "21600": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{3: 1.0}"}}'
)


def _client(write: Write, number: int, windows: list[str], lengths: str = LENGTHS) -> Path:
    lines = [line.format(start=600 * place) for place, line in enumerate(windows)]
    write(f"d/chunk-{number}-dataset.json", lengths)
    return write(f"d/chunk-{number}-trace.csv.gz", "\n".join(lines)).parent


def test_rates_are_scaled_together_and_silence_is_kept(write: Write, read: Read) -> None:
    _client(write, 3, ["{start},30,1,Gamma,1,1", IDLE, "{start},30,1,Gamma,1,1"])
    path = _client(write, 12, ["{start},10,4,Weibull,0.4,1", IDLE, IDLE])
    trace = read(path, window_start_s=0, window_s=1800, rate_per_s=0.7)
    assert trace.tenant_names == ("client-3", "client-12")
    assert len(trace) == pytest.approx(1260, abs=3)
    counts = np.bincount(trace.tenant)
    assert counts[0] / counts[1] == pytest.approx(6, rel=0.02)
    silent = (trace.arrival_s > 600) & (trace.arrival_s < 1200)
    assert not silent.any()
    assert set(trace.prompt_tokens) == {10, 20}
    assert set(trace.output_tokens) == {3}


def test_burstiness_survives_the_scaling(write: Write, read: Read) -> None:
    path = _client(write, 1, ["{start},100,3,Gamma,0.11,1"] * 6)
    trace = read(path, window_start_s=0, window_s=3600, rate_per_s=1)
    gaps = np.diff(trace.arrival_s)
    assert 2.4 < gaps.std() / gaps.mean() < 3.6


def test_one_file_of_a_client_brings_the_other(write: Write, read: Read) -> None:
    folder = _client(write, 1, ["{start},1,1,Gamma,1,1"] * 6)
    both = read(folder).digest()
    assert read(folder / "chunk-1-trace.csv.gz").digest() == both
    assert read(folder / "chunk-1-dataset.json").digest() == both
    (folder / "chunk-1-dataset.json").unlink()
    with pytest.raises(TraceError, match="other file is missing"):
        read(folder)


def test_a_span_without_anyone_is_refused(write: Write, read: Read) -> None:
    path = _client(write, 1, ["{start},1,1,Gamma,1,1", IDLE])
    with pytest.raises(TraceError, match="a client is active"):
        read(path, window_start_s=600, window_s=600)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "{1: __import__('os')}",
        "{" * 500 + "}" * 500,
        "{1: {2: 3}}",
        "{1, 2}",
        "{1: -0.5}",
        "{1: 1e999}",
        "{-1: 0.5}",
        "{1: 0.5",
        "[1]",
        7,
        None,
    ],
)
def test_a_length_table_is_data_never_code(text: object) -> None:
    with pytest.raises(TraceError, match="a dict of token count"):
        length_table(text, "x")


def test_an_empty_length_table_knows_nothing() -> None:
    assert len(length_table("{}", "x")[0]) == 0
    assert len(length_table("{5: 0.0}", "x")[0]) == 0


@pytest.mark.parametrize("name", ["m-small", "m-large"])
def test_the_real_clients(shared_dir: Path, read: Read, name: str) -> None:
    trace = read(shared_dir / f"traces/servegen/data/language/{name}")
    assert trace.duration_s == pytest.approx(3600, abs=30)
    assert len(trace) / 3600 == pytest.approx(10, rel=0.02)
    assert len(trace.tenant_names) > 10
    small = name == "m-small"
    assert (np.median(trace.output_tokens) < 10) == small


SHOWING = (
    '{"0": {"text_tokens": "{75: 1.0}", "output_tokens": "{3: 1.0}",'
    ' "image_tokens": "{252: 0.75, 324: 0.25}", "image_count": "{0: 0.5, 2: 0.5}",'
    ' "audio_tokens": "{30: 1.0}", "audio_count": "{1: 1.0}",'
    ' "video_tokens": "{0: 1.0}", "video_count": "{0: 1.0}"}}'
)


def test_the_multimodal_form(write: Write, read: Read) -> None:
    _client(write, 7, ["{start},1,1,Gamma,1,1"] * 6)
    path = _client(write, 8, ["{start},1,1,Gamma,1,1"] * 6, SHOWING)
    trace = read(path, window_start_s=0, window_s=3600, rate_per_s=2)
    showing = trace.tenant == trace.tenant_names.index("client-8")
    media = trace.media
    assert np.array_equal(np.diff(media.offsets) > 0, showing)
    images = np.bincount(media.request[media.kind == 0], minlength=len(trace))[showing]
    assert set(images) == {0, 2}
    assert images.mean() == pytest.approx(1.0, abs=0.1)
    sizes = media.tokens[media.kind == 0]
    assert set(sizes) == {252, 324}
    assert (sizes == 252).mean() == pytest.approx(0.75, abs=0.05)
    shown = np.bincount(media.request, weights=media.tokens, minlength=len(trace))
    assert np.array_equal(trace.prompt_tokens[showing], 75 + shown[showing])
    # Images before audio, each behind the one before it, and each something else.
    of_first = slice(*media.offsets[np.flatnonzero(np.diff(media.offsets) == 3)[0] :][:2])
    assert media.kind[of_first].tolist() == [0, 0, 1]
    ends = media.start_tokens[of_first] + media.tokens[of_first]
    assert media.start_tokens[of_first].tolist() == [0, *ends[:-1]]
    assert len(np.unique(media.content)) == len(media)


def test_a_client_of_text_is_drawn_as_without_the_multimodal_form(write: Write, read: Read) -> None:
    folder = _client(write, 1, ["{start},1,1,Gamma,1,1"] * 6)
    trace = read(folder / "chunk-1-trace.csv.gz")
    assert len(trace.media) == 0


def test_a_multimodal_client_may_show_nothing(write: Write, read: Read) -> None:
    tables = '{"0": {"text_tokens": "{75: 1.0}", "output_tokens": "{3: 1.0}"}}'
    trace = read(_client(write, 1, ["{start},1,1,Gamma,1,1"] * 6, tables))
    assert len(trace.media) == 0
    assert set(trace.prompt_tokens) == {75}


def test_more_media_than_a_prompt_may_hold_are_refused(write: Write, read: Read) -> None:
    tables = SHOWING.replace("{0: 0.5, 2: 0.5}", "{1000: 1.0}").replace("252: 0.75", "9000000: 1")
    with pytest.raises(TraceError, match="at most 10,000,000 with all that it shows"):
        read(_client(write, 1, ["{start},1,1,Gamma,1,1"] * 6, tables))
