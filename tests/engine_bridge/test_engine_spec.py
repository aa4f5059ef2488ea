"""Engines: shipped ones, files, their limits, and one clear line for every bad file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.engine_bridge.engine_file import write_engine_file
from trimtab.engine_bridge.engine_spec import engine_names, find_engine_file, get_engine_spec
from trimtab.engine_bridge.errors import EngineSpecError, InputError

TP8 = "h100:llama-3.1-70b-tp8"


def _content() -> dict[str, Any]:
    return find_engine_file(TP8).model_dump(exclude_none=True)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("h100:llama-3.1-8b-tp1", 26_400),
        ("h100:llama-3.1-70b-tp4", 28_000),
        ("h100:llama-3.1-70b-tp8", 82_000),
    ],
)
def test_kv_capacity_follows_from_memory_weights_and_gpus(name: str, blocks: int) -> None:
    assert get_engine_spec(name).num_gpu_blocks == pytest.approx(blocks, rel=0.02)


@pytest.mark.parametrize("name", engine_names())
def test_shipped_engines_state_their_error_on_held_out_rows(name: str) -> None:
    errors = get_engine_spec(name).fidelity["relative_error"]["held_out"]
    for kind in ("all", "decode", "prefill", "mixed"):
        assert errors[kind]["median"] <= 0.03
        assert errors[kind]["p95"] <= 0.08


def test_price_grows_with_the_gpus() -> None:
    assert get_engine_spec(TP8).cost_per_hour == 8 * 3.0


def test_limits_change_only_what_is_given() -> None:
    spec = get_engine_spec(TP8)
    changed = spec.with_limits(max_num_seqs=16, enable_prefix_caching=False)
    assert (changed.max_num_seqs, changed.enable_prefix_caching) == (16, False)
    assert changed.num_gpu_blocks == spec.num_gpu_blocks
    assert spec.with_limits() == spec


def test_a_new_block_size_keeps_the_capacity_in_tokens() -> None:
    spec = get_engine_spec(TP8)
    changed = spec.with_limits(block_size=32)
    assert changed.num_gpu_blocks == spec.num_gpu_blocks // 2
    assert spec.with_limits(block_size=32, num_gpu_blocks=9).num_gpu_blocks == 9


@pytest.mark.parametrize("key", ["max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks"])
def test_limits_below_one_are_refused(key: str) -> None:
    with pytest.raises(EngineSpecError, match=rf"{key}.*0.*at least 1"):
        get_engine_spec(TP8).with_limits(**{key: 0})


def test_a_block_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(EngineSpecError, match="block_size"):
        get_engine_spec(TP8).with_limits(block_size=10**9)


def test_a_mistyped_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(EngineSpecError, match='did you mean "h100'):
        get_engine_spec("h100:llama-3.1-70b-tp9")


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_an_engine_file_gives_the_same_engine(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"engine.{ending}"
    if ending == "yaml":
        write_engine_file(find_engine_file(TP8), path)
    else:
        path.write_text(json.dumps(_content()))
    assert get_engine_spec(path) == get_engine_spec(TP8)


def test_given_blocks_go_before_the_memory(tmp_path: Path) -> None:
    content = _content()
    content["limits"]["num_gpu_blocks"] = 123
    path = tmp_path / "engine.yaml"
    path.write_text(yaml.safe_dump(content))
    assert get_engine_spec(path).num_gpu_blocks == 123


def _set(path: str, value: object) -> Any:
    def change(content: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            content = content[parent]
        if value is ...:
            del content[last]
        else:
            content[last] = value

    return change


BAD_CONTENT = {
    "unknown key": (_set("colour", 1), "colour"),
    "mistyped key": (_set("coeficients", 1), "did you mean"),
    "unknown memory key": (_set("memory.weight_gib", 1), "weights_gib"),
    "missing model": (_set("model", ...), "model"),
    "missing memory": (_set("memory", ...), "memory"),
    "missing coefficient": (_set("coefficients.pair_ns", ...), "lacks pair_ns"),
    "unknown coefficient": (_set("coefficients.pairs_ns", 1.0), "pair_ns"),
    "NaN coefficient": (_set("coefficients.pair_ns", float("nan")), "nan"),
    "infinite coefficient": (_set("coefficients.pair_ns", float("inf")), "inf"),
    "negative coefficient": (_set("coefficients.pair_ns", -1.0), "from 0"),
    "text coefficient": (_set("coefficients.pair_ns", "fast"), "fast"),
    "true as a coefficient": (_set("coefficients.pair_ns", True), "True"),
    "list of coefficients": (_set("coefficients", [1.0, 2.0]), "2 values"),
    "no coefficients": (_set("coefficients", None), "None"),
    "tp 0": (_set("tp", 0), "tp"),
    "tp as text": (_set("tp", "eight"), "eight"),
    "negative weights": (_set("memory.weights_gib", -1.0), "weights_gib"),
    "NaN memory": (_set("memory.gpu_memory_gib", float("nan")), "gpu_memory_gib"),
    "utilization above 1": (_set("memory.gpu_memory_utilization", 1.5), "utilization"),
    "weights that do not fit": (_set("memory.weights_gib", 9999.0), "weights_gib"),
    "no sequences": (_set("limits.max_num_seqs", 0), "max_num_seqs"),
    "half a token": (_set("limits.max_num_batched_tokens", 0.5), "max_num_batched_tokens"),
    "negative price": (_set("cost_usd_per_gpu_hour", -3.0), "cost_usd_per_gpu_hour"),
    "caching as text": (_set("limits.enable_prefix_caching", "maybe"), "enable_prefix_caching"),
}


@pytest.mark.parametrize("kind", BAD_CONTENT)
def test_a_bad_value_is_named_in_one_line(tmp_path: Path, kind: str) -> None:
    change, expected = BAD_CONTENT[kind]
    content = _content()
    change(content)
    path = tmp_path / "engine.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(EngineSpecError) as caught:
        get_engine_spec(path)
    line = str(caught.value)
    assert "engine.yaml" in line
    assert expected in line
    assert "\n" not in line


BAD_FILES = {
    "empty": (b"", "engine.yaml", "empty file"),
    "empty JSON": (b"", "engine.json", "YAML or JSON"),
    "a list": (b"[1, 2]", "engine.yaml", "list"),
    "binary": (b"\x00\xff\xfe\x9f", "engine.yaml", "binary data"),
    "broken YAML": (b"name: [", "engine.yaml", "YAML or JSON"),
    "broken JSON": (b'{"name": ', "engine.json", "YAML or JSON"),
    "control characters": (b"name: \x07", "engine.yaml", "YAML or JSON"),
    "a table": (b"a,b\n1,2\n", "engine.yml", "mapping"),
    "an object tag": (b"!!python/object:os.system {}", "engine.yaml", "YAML or JSON"),
    "deeply nested": (b"[" * 20_000, "engine.json", "YAML or JSON"),
    "too large": (b"#" * 1_000_001, "engine.yaml", "1 MB"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_file_that_is_no_engine_file_is_refused(tmp_path: Path, kind: str) -> None:
    data, name, expected = BAD_FILES[kind]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(EngineSpecError) as caught:
        get_engine_spec(path)
    assert name in str(caught.value)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_absent_files_and_folders_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(EngineSpecError):
            get_engine_spec(path)


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineSpecError, match="writable"):
        write_engine_file(find_engine_file(TP8), tmp_path / "no" / "engine.yaml")


@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_garbage_gives_one_line(tmp_path: Path, data: bytes) -> None:
    for name in ("garbage.yaml", "garbage.json"):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(InputError) as caught:
            get_engine_spec(path)
        assert "\n" not in str(caught.value)
