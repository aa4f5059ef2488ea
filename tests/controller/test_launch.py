"""The command that `trimtab serve` becomes, and what it refuses to."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from trimtab.controller import launch
from trimtab.controller.launch import Launch, Request, plan_launch
from trimtab.engine_bridge.errors import InputError, TrimtabError
from trimtab.engine_bridge.vllm.identity import IDENTITY, IdentitySettings
from trimtab.engine_bridge.vllm.settings import PluginSettings

ENGINE = "h100:llama-3.1-70b-tp8"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of what counts as installed, to be changed by a test."""
    versions = {"vllm": "0.33.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(launch.metadata, "version", version)
    monkeypatch.setattr(launch.util, "find_spec", lambda name: object())
    return versions


def plan(*words: str, environment: dict[str, str] | None = None, **request: Any) -> Launch:
    return plan_launch(Request(words=words, **request), environment=environment or {})


def value(made: Launch, flag: str) -> str:
    assert made.command.count(flag) == 1, made.command
    return made.command[made.command.index(flag) + 1]


def settings(made: Launch) -> PluginSettings:
    return PluginSettings.of(json.loads(value(made, "--additional-config")))


def identity(made: Launch) -> IdentitySettings:
    return IdentitySettings.from_environment(made.environment)


def test_a_model_is_served_with_the_fair_scheduler_and_identity() -> None:
    made = plan("org/model", "-tp", "8", "--port", "9000", engine=ENGINE)
    assert made.command[1:9] == (
        *("-m", "vllm.entrypoints.cli.main", "serve", "org/model"),
        *("-tp", "8", "--port", "9000"),
    )
    assert value(made, "--scheduler-cls") == "trimtab.engine_bridge.vllm.FairScheduler"
    assert value(made, "--scheduling-policy") == "priority"
    assert value(made, "--middleware").endswith(".IdentityMiddleware")
    assert settings(made) == PluginSettings(engine=ENGINE)
    assert made.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "TRIMTAB_EMULATE" not in made.environment
    assert "--distributed-executor-backend" not in made.command


def test_an_emulated_engine_brings_its_own_limits() -> None:
    made = plan(emulate=ENGINE, time_scale=0.5)
    assert value(made, "--served-model-name") == "llama-3.1-70b-tp8"
    assert value(made, "--block-size") == "16"
    assert value(made, "--max-num-seqs") == "256"
    assert value(made, "--max-num-batched-tokens") == "8192"
    assert value(made, "--distributed-executor-backend").endswith("EmulatedExecutor")
    assert "--enable-prefix-caching" in made.command
    assert settings(made) == PluginSettings(engine=ENGINE, emulate=True, time_scale=0.5)
    assert made.environment["TRIMTAB_EMULATE"] == "1"
    assert made.environment["HF_HUB_OFFLINE"] == "1"
    assert (Path(made.command[4]) / "config.json").is_file()


def test_the_users_limits_go_before_the_engines() -> None:
    made = plan(
        *("--max_num_seqs=64", "--block-size", "32", "--no-enable-prefix-caching"),
        *("--served-model-name", "mine"),
        emulate=ENGINE,
    )
    assert "--max_num_seqs=64" in made.command
    assert "--max-num-seqs" not in made.command
    assert value(made, "--block-size") == "32"
    assert value(made, "--served-model-name") == "mine"
    assert "--enable-prefix-caching" not in made.command


def test_the_host_cannot_turn_an_emulated_engine_into_another_one() -> None:
    host = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "4", "HOME": "h"}
    assert plan(emulate=ENGINE, environment=host).removed == (
        "VLLM_TARGET_DEVICE",
        "VLLM_CPU_KVCACHE_SPACE",
    )
    assert plan("m", environment=host).removed == ()


@pytest.mark.parametrize(("stock", "stamps"), [("fcfs", False), ("priority", True)])
def test_vllms_own_schedulers_can_be_had(stock: str, stamps: bool) -> None:
    made = plan("m", stock=stock)
    assert "--scheduler-cls" not in made.command
    assert value(made, "--scheduling-policy") == stock
    assert identity(made).priority is stamps


def test_files_are_named_by_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digest = hashlib.sha256(b"k").hexdigest()
    Path("keys.yaml").write_text(f"acme: {{keys_sha256: [{digest}]}}\n")
    made = plan(
        "m",
        plan="published",
        keys=Path("keys.yaml"),
        control_socket=Path("c.sock"),
        step_log=Path("steps"),
        traffic_log=Path("traffic"),
    )
    assert settings(made) == PluginSettings(
        plan="published",
        control_socket=str(tmp_path / "c.sock"),
        step_log_dir=str(tmp_path / "steps"),
        traffic_log_dir=str(tmp_path / "traffic"),
    )
    assert identity(made) == IdentitySettings(plan="published", keys=str(tmp_path / "keys.yaml"))


def test_other_plug_ins_keep_their_settings() -> None:
    made = plan("m", "--additional_config", '{"other": 1}', "--port", "1", engine=ENGINE)
    config = json.loads(value(made, "--additional-config"))
    assert config == {"other": 1, "trimtab": {"engine": ENGINE}}
    assert "--additional_config" not in made.command
    assert value(made, "--port") == "1"


def test_a_salt_secret_is_made_once_and_shown_never() -> None:
    first, second = plan("m"), plan("m")
    secret = first.environment["TRIMTAB_SALT_SECRET"]
    assert secret != second.environment["TRIMTAB_SALT_SECRET"]
    assert secret not in first.shell()
    given = plan("m", environment={"TRIMTAB_SALT_SECRET": "x" * 32})
    assert "TRIMTAB_SALT_SECRET" not in given.environment


def test_the_printed_command_is_what_would_run() -> None:
    made = plan(emulate=ENGINE, environment={"VLLM_TARGET_DEVICE": "cpu"})
    line = made.shell()
    assert line.startswith("env -u VLLM_TARGET_DEVICE ")
    assert f"{IDENTITY}=" in line
    assert '\'{"trimtab":' in line


def test_a_repackaged_vllm_is_started_by_its_module(installed: dict[str, str]) -> None:
    installed.clear()
    installed["vllm-cpu"] = "0.32.0"
    made = plan("m")
    assert made.command[1:5] == ("-m", "vllm.entrypoints.openai.api_server", "--model", "m")


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "0.34.0rc1"])
def test_an_untested_vllm_is_refused(installed: dict[str, str], version: str) -> None:
    installed["vllm"] = version
    with pytest.raises(TrimtabError, match=r"from 0\.32 to below 0\.34; pip install"):
        plan("m")


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1", "0.33.0+cpu"])
def test_a_tested_vllm_is_taken(installed: dict[str, str], version: str) -> None:
    installed["vllm"] = version
    assert plan("m").command


def test_without_vllm_one_line_says_what_to_install(installed: dict[str, str]) -> None:
    installed.clear()
    with pytest.raises(TrimtabError, match=r"not installed; pip install 'trimtab\[vllm\]'"):
        plan("m")


@pytest.mark.parametrize(
    ("words", "request_", "found"),
    [
        ((), {}, "neither MODEL nor --emulate"),
        (("--port", "1"), {}, "neither MODEL nor --emulate"),
        (("m",), {"emulate": ENGINE}, "MODEL and --emulate"),
        (("m", "--scheduler-cls", "x.Y"), {}, "--scheduler-cls"),
        (("m", "--scheduler_cls=x.Y"), {"stock": "fcfs"}, "--scheduler-cls"),
        (("m", "--scheduling-policy", "fcfs"), {}, "--scheduling-policy"),
        (("m", "--middleware", "x.Y"), {}, "--middleware"),
        (("--tokenizer", "t"), {"emulate": ENGINE}, "--tokenizer"),
        (("--model", "t"), {"emulate": ENGINE}, "--model"),
        (("m",), {"time_scale": 1.0}, "--time-scale"),
        ((), {"emulate": ENGINE, "time_scale": -1.0}, "time_scale: -1.0"),
        ((), {"emulate": ENGINE, "engine": ENGINE}, "--engine"),
        ((), {"emulate": "h100:llama-3.1-70b-tp9"}, 'did you mean "h100:llama-3.1-70b-tp8"?'),
        (("m",), {"engine": "nope"}, '"nope"'),
        (("m",), {"stock": "fifo"}, 'did you mean "fcfs"?'),
        (("m",), {"plan": "defualt"}, 'did you mean "default"?'),
        (("m",), {"keys": Path("k"), "trust_labels": True}, "without --trust-labels"),
        (("m", "--api-key", "x"), {"keys": Path("k")}, "take away --api-key"),
        (("m",), {"keys": Path("no-such-file")}, "no-such-file"),
        (("m",), {"control_tcp": "h:1"}, "TRIMTAB_CONTROL_TOKEN"),
        (("m", "--additional-config", "{"), {}, "JSON object"),
        (("m", "--additional-config", '{"trimtab": {}}'), {}, "left to trimtab"),
        (("m", "--additional-config.x", "1"), {}, "one JSON text"),
    ],
)
def test_a_wrong_wish_is_one_line_that_says_what_to_change(
    words: tuple[str, ...], request_: dict[str, Any], found: str
) -> None:
    with pytest.raises(InputError) as caught:
        plan(*words, **request_)
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_short_salt_secret_is_refused() -> None:
    with pytest.raises(InputError, match="TRIMTAB_SALT_SECRET"):
        plan("m", environment={"TRIMTAB_SALT_SECRET": "short"})


ADMISSION = "tiers: {T3: {requests_per_minute: 60}}\n"


def admission_file(folder: Path, text: str = ADMISSION) -> Path:
    path = folder / "admission.yaml"
    path.write_text(text)
    return path


def test_admission_reaches_the_middleware_with_engine_and_socket(tmp_path: Path) -> None:
    file = admission_file(tmp_path)
    made = plan(emulate=ENGINE, admission=file, control_socket=tmp_path / "c.sock")
    told = identity(made)
    assert (told.admission, told.engine) == (str(file), ENGINE)
    assert told.control == str(tmp_path / "c.sock")
    over_tcp = plan(
        "m",
        admission=file,
        control_tcp="127.0.0.1:9000",
        environment={"TRIMTAB_CONTROL_TOKEN": "0123456789abcdef"},
    )
    assert identity(over_tcp).control == "tcp://127.0.0.1:9000"


def test_vllm_tells_admission_of_cached_tokens_and_operators_keep_their_flags(
    tmp_path: Path,
) -> None:
    file, wanted = admission_file(tmp_path), "--enable-prompt-tokens-details"
    assert plan("m", admission=file).command.count(wanted) == 1
    assert plan("m", wanted, admission=file).command.count(wanted) == 1
    assert wanted not in plan("m", "--no-enable-prompt-tokens-details", admission=file).command
    assert wanted not in plan("m").command
    assert identity(plan("m", "--enable-force-include-usage", admission=file)).usage_always


def test_without_admission_nothing_of_it_is_said() -> None:
    made = plan(emulate=ENGINE, control_socket=Path("c.sock"))
    assert identity(made) == IdentitySettings()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tiers: {T9: {}}", "T9"),
        ("tiers: {T3: {request_per_minute: 6}}", "requests_per_minute"),
        ("storage: etcd://x", "memory://"),
        ("saturation: {queue_length: 5}", "--control-socket"),
    ],
)
def test_faults_of_the_admission_file_show_at_the_start(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        plan("m", admission=admission_file(tmp_path, text))


@pytest.mark.parametrize(
    "words", [("--api-server-count", "2"), ("--api_server_count=2",), ("-dp", "2")]
)
def test_several_api_servers_need_a_storage_that_they_share(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    with pytest.raises(InputError, match="redis://"):
        plan("m", *words, admission=admission_file(tmp_path))
    pytest.importorskip("limits")
    pytest.importorskip("redis")
    shared = admission_file(tmp_path, "storage: redis://127.0.0.1:1/0")
    assert identity(plan("m", *words, admission=shared)).admission is not None
