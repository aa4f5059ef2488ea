"""The gateway's settings: what is wrong is said in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trimtab.engine_bridge.errors import InputError
from trimtab.engine_bridge.gateway import collector
from trimtab.engine_bridge.gateway.settings import TraceSettings, load_settings
from trimtab.engine_bridge.gateway.setup import engine_key, read_files

ENGINE = {"url": "http://127.0.0.1:8000", "models": ["m"]}
TRACES = {"endpoint": "http://127.0.0.1:4318"}


def read(folder: Path, **settings: Any) -> Any:
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump({"engines": {"a": ENGINE}, **settings}))
    return read_files(path)


def test_the_least_file_has_one_engine(tmp_path: Path) -> None:
    files = read(tmp_path)
    assert files.settings.engines["a"].metrics_url == "http://127.0.0.1:8000/metrics"
    assert files.admission is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engines": {}}, ["engines", "at least 1"]),
        ({"engines": {"a": {**ENGINE, "url": "127.0.0.1:8000"}}}, ["engines.a.url", "URL"]),
        ({"engines": {"a": {**ENGINE, "url": "http://u:p@h"}}}, ["engines.a.url", "URL"]),
        ({"engines": {"a": {**ENGINE, "url": "http://a..b:80"}}}, ["engines.a.url", "URL"]),
        ({"engines": {"a": {**ENGINE, "url": "http://h/a b"}}}, ["engines.a.url", "URL"]),
        ({"engines": {"a": {**ENGINE, "url": "http://h/\u00e4"}}}, ["engines.a.url", "URL"]),
        ({"engines": {"a": {**ENGINE, "models": []}}}, ["engines.a.models"]),
        ({"engines": {"a": {**ENGINE, "tier": ["T0"]}}}, ["engines.a.tier", "tiers"]),
        ({"engines": {"a": ENGINE, "b": ENGINE}}, ["engines.b.url", "engine a"]),
        ({"engines": {"a": {**ENGINE, "tiers": ["T9"]}}}, ["engines.a.tiers", "T9", "T0"]),
        ({"drafts": {"T2": "code"}}, ["drafts.T2", "code"]),
        ({"reserve_tiers": ["gold"]}, ["reserve_tiers", "gold"]),
        ({"caps": {"body_mib": 0}}, ["caps.body_mib", "at least 1"]),
        ({"caps": {"bodies_mib": 8}}, ["caps.bodies_mib", "caps.body_mib, 64"]),
        ({"time_outs": {"wait": 3}}, ["time_outs.wait", "wait_s"]),
        ({"traces": {}}, ["traces.endpoint", "must be given"]),
        ({"traces": {**TRACES, "endpoint": "collector:4318"}}, ["traces.endpoint", "URL"]),
        ({"traces": {**TRACES, "sampled_fraction": 2.0}}, ["traces.sampled_fraction", "at most 1"]),
        ({"traces": {**TRACES, "client_context": "join"}}, ["traces.client_context", "link"]),
        ({"traces": {**TRACES, "headers_file": "none.yaml"}}, ["none.yaml", "exists"]),
        ({"keys": "nowhere.yaml"}, ["nowhere.yaml"]),
        ({"admission": "nowhere.yaml"}, ["nowhere.yaml"]),
        ({"plan": "nowhere"}, ["nowhere"]),
        ({"engines": {"a": {**ENGINE, "step_times": "h100:nope"}}}, ["h100:nope"]),
    ],
)
def test_a_fault_is_one_line_with_file_key_and_remedy(
    tmp_path: Path, settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, **settings)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists"):
        load_settings(tmp_path / "no.yaml")


def test_tenants_that_fit_no_header_are_refused_at_the_start(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"日本: {{keys_sha256: [{'a' * 64}]}}\n")
    with pytest.raises(InputError, match="Latin"):
        read(tmp_path, keys=str(keys))


def test_the_engines_key_must_fit_a_header() -> None:
    assert engine_key({}) is None
    assert engine_key({"TRIMTAB_ENGINE_KEY": "sk-1"}) == "sk-1"
    for bad in ("", "a b", "a\nb", "é"):
        with pytest.raises(InputError, match="TRIMTAB_ENGINE_KEY"):
            engine_key({"TRIMTAB_ENGINE_KEY": bad})


def test_traces_without_their_extra_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_NEEDED", ("opentelemetry_of_nobody.sdk",))
    with pytest.raises(InputError, match=r"traces: .*pip install 'trimtab\[otel\]'"):
        read(tmp_path, traces=TRACES)
    assert read(tmp_path).collector_headers is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a b: x", "must be the name of a header"),
        ("key: 7", "line 1: key: must be text of printable ASCII characters; put it in quotes"),
        ('key: "geheim\\n"', "line 1: key: must be text"),
        ("- geheim", "write a name and a value a line"),
        ("geheim", "write a name and a value a line"),
    ],
)
def test_a_wrong_file_of_headers_is_named_and_its_values_are_not_shown(
    tmp_path: Path, text: str, words: str
) -> None:
    headers = tmp_path / "headers.yaml"
    headers.write_text(text)
    with pytest.raises(InputError) as caught:
        read(tmp_path, traces={**TRACES, "headers_file": str(headers)})
    assert words in str(caught.value)
    assert "geheim" not in str(caught.value)


def test_a_token_for_the_collector_must_fit_into_a_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_TRACES_TOKEN", "geheim\r\nx: y")
    with pytest.raises(InputError, match="TRIMTAB_TRACES_TOKEN: must be printable") as caught:
        read(tmp_path, traces=TRACES)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_a_collector_without_a_path_has_the_usual_one(endpoint: str, url: str) -> None:
    assert TraceSettings(endpoint=endpoint).traces_url == url
