"""The plug-in's settings: what vLLM hands over, checked, and back again."""

from __future__ import annotations

import json

import pytest

from trimtab.engine_bridge.vllm.settings import PluginSettings, SettingsError


def test_what_is_set_survives_the_way_through_the_command_line() -> None:
    settings = PluginSettings(
        plan="p.yaml", emulate=True, time_scale=0.0, control_tcp="[::1]:0", interval_s=0.5
    )
    config = json.loads(json.dumps(settings.as_additional_config()))
    assert PluginSettings.of({"another": {"key": 1}, **config}) == settings


def test_only_what_was_set_is_handed_on() -> None:
    assert PluginSettings(emulate=False).as_additional_config() == {"trimtab": {"emulate": False}}


@pytest.mark.parametrize("config", [{}, {"another": 1}, {"trimtab": None}, None])
def test_without_a_section_the_defaults_hold(config: object) -> None:
    assert PluginSettings.of(config) == PluginSettings()


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"time_scal": 1.0}, ["time_scal", 'did you mean "time_scale"?']),
        ({"zzz": 1.0}, ["zzz", "known keys: plan, engine"]),
        ({"time_scale": -1}, ["time_scale", "-1", "greater than or equal to 0"]),
        ({"time_scale": float("nan")}, ["time_scale", "finite"]),
        ({"emulate": "yes"}, ["emulate", '"yes"', "boolean"]),
        ({"plan": ""}, ["plan", "at least 1 character"]),
        ({"interval_s": 0.0}, ["interval_s", "0.1"]),
        ({"control_tcp": "localhost"}, ["control_tcp", "host:port"]),
        ({"control_tcp": "h:65536"}, ["control_tcp", "65535"]),
        ([1], ["mapping"]),
    ],
)
def test_a_fault_is_one_line_that_says_what_to_change(section: object, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        PluginSettings.of({"trimtab": section})
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("--additional-config trimtab")
    assert [word for word in words if word not in line] == []


def test_a_mistyped_key_is_reported_before_a_bad_value() -> None:
    with pytest.raises(SettingsError, match="did you mean"):
        PluginSettings.of({"trimtab": {"time_scale": -1, "emulat": True}})
