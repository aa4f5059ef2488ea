"""The daemon's settings: what may be left out, and one clear line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.agents.guard_settings import DEFAULT_REACH, GuardSettings
from trimtab.agents.verdict import GuardMode
from trimtab.controller.daemon.settings import SettingsError, load_settings, settings_from

LEAST = """\
engines:
  a: {control: run/a.sock, metrics: "http://127.0.0.1:8000/metrics"}
"""
WHOLE = """\
listen: 0.0.0.0:9000
hosts: [trimtab.example]
state_dir: state
prometheus: {url: "http://prometheus:9090", token_file: token, timeout_s: 2}
policy: bundle:champion
mode: shadow
guard: {probation_s: 120, reach: {weights: 1, kv_fractions: 0.5}}
profile: {enabled: false, baseline_factor: 4, for_s: 60, sample_s: 30, at_most_every_s: 600}
audit: {enabled: true, most_mib: 8, most_files: 4}
engines:
  a:
    plan: published
    control: run/a.sock
    metrics: http://127.0.0.1:8000/metrics
    mode: active
  b:
    control: tcp://10.0.0.2:9470
    rank: 1
    policy: reactive
    traffic_log: traffic
    prometheus: {url: "http://other:9090", match: {job: vllm, instance: "b:8000"}}
  c: {control: run/c.sock}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "daemon.yaml"
    path.write_text(text)
    return path


def test_an_engine_is_all_that_must_be_said(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, LEAST))
    assert settings.listen == "127.0.0.1:9464"
    assert settings.policy_of("a") == "learned"
    assert settings.mode_of("a") is GuardMode.SHADOW, "nothing moves unless it is said"
    assert settings.guard_settings == GuardSettings()
    assert settings.prometheus_of("a") is None
    assert settings.engines["a"].plan == "default"


def test_an_engine_may_differ_from_what_holds_for_all(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, WHOLE))
    assert [settings.mode_of(name) for name in "abc"] == ["active", "shadow", "shadow"]
    assert [settings.policy_of(name) for name in "abc"] == [
        "bundle:champion", "reactive", "bundle:champion"
    ]  # fmt: skip
    sources = [settings.prometheus_of(name) for name in "abc"]
    assert [source and source.url for source in sources] == [
        None, "http://other:9090", "http://prometheus:9090"
    ]  # fmt: skip
    guard = settings.guard_settings
    assert guard.probation_s == 120
    assert guard.reach == {"weights": 1, "kv_fractions": 0.5}
    assert guard.ramp_s == GuardSettings().ramp_s


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("mode: shadow", "mode: activ", "line 6: mode: \"activ\", must be one of"),
        ("mode: shadow", "mode: hold", "line 6: mode: \"hold\", must be one of"),
        ("mode: shadow", "moed: shadow", 'line 6: moed: must be a known key; did you mean "mode"?'),
        ("policy: reactive", "policy: reactiv", 'line 19: engines.b.policy: "reactiv", must be one '
         'of static, reactive, learned, or bundle:FOLDER; did you mean "reactive"?'),
        ("bundle:champion", "models:/m@champion", "trimtab pull models:/m@champion --into DIR"),
        ("bundle:champion", '"bundle:"', "bundle:FOLDER"),
        ("probation_s: 120", "probation: 120", 'guard.probation: 120, must be a setting of the '
         'guard; did you mean "probation_s"?'),
        ("probation_s: 120", "probation_s: -1", "guard.probation_s: -1, must be a number"),
        ("probation_s: 120", "most_trips: 1.5", "guard.most_trips: 1.5, must be a whole number"),
        ("{weights: 1,", "{weight: 1,", 'guard.reach.weight: 1, must be a knob with a reach; did '
         'you mean "weights"?'),
        ("for_s: 60", "for_s: 0", "profile.for_s: 0, must be above 0"),
        ("most_files: 4", "most_files: 0", "audit.most_files: 0, must be at least 1"),
        ("metrics: http:", "metrics: ftp:", "engines.a.metrics: \"ftp://127.0.0.1:8000/metrics\""),
        ("control: run/c.sock", "control: run/a.sock", "engines.c.control: \"run/a.sock\", must be "
         "another one than that of engine a"),
        ("control: run/c.sock", "control: unix:./run//a.sock", "another one than that of engine a"),
        ("control: run/c.sock", 'control: ""', 'engines.c.control: "", must be a path'),
        ("bundle:champion", r'"bundle:a\0b"', "must be a path"),
        ("probation_s: 120", f"probation_s: 1{'0' * 400}", "must be at most 1.79769e+308"),
        ("probation_s: 120", f"novel_window: 1{'0' * 400}", "must be at most 1e+06"),
        ("probation_s: 120", "canary_fraction: 7", "guard.canary_fraction: 7, must be at most 1"),
        ("probation_s: 120", "static_after_intervals: 1e6",
         "guard.static_after_intervals: 1000000.0, must be at most 100"),
        ("probation_s: 120", "novel_window: 0", "guard.novel_window: 0, must be a whole number, at "
         "least 1"),
        ("probation_s: 120", "novel_window: 5", "guard.novel_window: 5, must be at least "
         "novel_intervals, 6; novel_fraction: 1 switches the envelope off"),
        ("rank: 1", "rank: -1", "engines.b.rank: -1, must be at least 0"),
        ("prometheus: {url: \"http://prometheus:9090\", token_file: token, timeout_s: 2}\n", "",
         "engines.c.metrics: null, must be the URL of the engine's /metrics"),
        ("    mode: active", "    prometheus: {url: \"http://p:9090\"}",
         "engines.a.metrics: \"http://127.0.0.1:8000/metrics\", must be left out where prometheus"),
        ("  c: {", "  c/d: {", "1 to 64 of A-Z a-z 0-9"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_with_a_remedy(
    tmp_path: Path, before: str, after: str, line: str
) -> None:
    assert WHOLE.count(before) == 1
    path = written(tmp_path, WHOLE.replace(before, after))
    with pytest.raises(SettingsError) as caught:
        load_settings(path)
    text = str(caught.value)
    assert line in text
    assert text.startswith(str(path))
    assert "\n" not in text
    assert caught.value.exit_code == 2


def test_a_file_without_engines_or_that_is_none_is_refused(tmp_path: Path) -> None:
    for text, line in (
        ("engines: {}", "engines: {}, must be at least 1 entries long"),
        ("mode: shadow", "engines: must be given"),
        ("- a", "must be a mapping of keys to values; docs/run.md shows one"),
        ("engines: [", "valid YAML"),
    ):
        with pytest.raises(SettingsError) as caught:
            load_settings(written(tmp_path, text))
        assert line.split(",")[0] in str(caught.value)
    with pytest.raises(SettingsError, match="a file that exists"):
        load_settings(tmp_path / "none.yaml")


def test_flags_make_the_same_settings(tmp_path: Path) -> None:
    engine = {"control": "run/a.sock", "metrics": "http://127.0.0.1:8000/metrics"}
    assert settings_from({"engines": {"a": engine}}, where="run") == load_settings(
        written(tmp_path, LEAST)
    )
    with pytest.raises(SettingsError, match=r"^run: mode: "):
        settings_from({"engines": {"a": engine}, "mode": "x"}, where="run")


def test_every_knob_with_a_reach_may_be_given_one(tmp_path: Path) -> None:
    reach = ", ".join(f"{knob}: 0.5" for knob in DEFAULT_REACH)
    settings = load_settings(written(tmp_path, f"{LEAST}guard: {{reach: {{{reach}}}}}\n"))
    assert set(settings.guard_settings.reach) == set(DEFAULT_REACH)
