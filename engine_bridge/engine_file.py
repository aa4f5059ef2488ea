"""Engine files: the YAML or JSON form of an engine, read, checked and written.

It knows the form only; `trimtab.engine_bridge.engine_spec` turns it into what the replay uses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from trimtab.engine_bridge.draft_spec import DraftFile
from trimtab.engine_bridge.encoder_spec import EncoderFile, EncoderKindFile
from trimtab.engine_bridge.errors import EngineSpecError, did_you_mean
from trimtab.engine_bridge.kv_memory import kv_blocks
from trimtab.engine_bridge.step_time import COEFFICIENTS, OPTIONAL_COEFFICIENTS

_NAMES = tuple(name for name, _, _ in COEFFICIENTS)
_OPTIONAL = tuple(name for name, _, _ in OPTIONAL_COEFFICIENTS)
_LARGEST_COEFFICIENT = 1e9
_LARGEST_FILE_BYTES = 1_000_000


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class EngineMemory(_Part):
    """What the KV capacity follows from (`kv_memory.kv_blocks`)."""

    gpu_memory_gib: float = Field(gt=0, le=1024)
    gpu_memory_utilization: float = Field(gt=0, le=1)
    overhead_gib: float = Field(ge=0, le=1024)
    weights_gib: float = Field(gt=0, le=16384)
    kv_kib_per_token: float = Field(gt=0, le=65536)


class EngineLimits(_Part):
    """The scheduler's own limits, as vLLM names them."""

    block_size: int = Field(default=16, ge=1, le=4096)
    max_num_seqs: int = Field(default=256, ge=1, le=65536)
    max_num_batched_tokens: int = Field(default=8192, ge=1, le=1_048_576)
    num_gpu_blocks: int | None = Field(default=None, ge=1, le=1_000_000_000)
    enable_prefix_caching: bool = True


class EngineFile(_Part):
    """One engine file."""

    name: str = Field(min_length=1, max_length=200)
    model: str = Field(min_length=1, max_length=200)
    gpu: str = Field(default="H100-SXM-80GB", min_length=1, max_length=200)
    tp: int = Field(ge=1, le=64)
    memory: EngineMemory
    limits: EngineLimits = EngineLimits()
    cost_usd_per_gpu_hour: float = Field(default=3.0, ge=0, le=10_000)
    coefficients: dict[str, float]
    draft: DraftFile | None = None
    encoder: EncoderFile | None = None
    fidelity: dict[str, Any] = Field(default_factory=dict)

    @field_validator("coefficients", mode="before")
    @classmethod
    def _numbers(cls, value: object) -> object:
        if not isinstance(value, dict):
            size = f"{len(value)} values" if isinstance(value, list) else repr(value)
            raise ValueError(f"is {size}, must be a mapping of {len(_NAMES)} names to numbers")
        for name in value:
            if name not in _NAMES:
                hint = did_you_mean(str(name), _NAMES) or f"known are {', '.join(_NAMES)}"
                raise ValueError(f"has the unknown name {name!r}; {hint}")
        missing = [name for name in _NAMES if name not in value and name not in _OPTIONAL]
        if missing:
            needed = len(_NAMES) - len(_OPTIONAL)
            raise ValueError(f"lacks {', '.join(missing)}; all {needed} must be given")
        for name, number in value.items():
            good = isinstance(number, int | float) and not isinstance(number, bool)
            if not (good and 0 <= number <= _LARGEST_COEFFICIENT):
                bound = f"must be a number from 0 to {_LARGEST_COEFFICIENT:g}"
                raise ValueError(f"has {name} = {number!r}, {bound}")
        return {name: float(value.get(name, 0.0)) for name in _NAMES}

    def blocks(self) -> int:
        """KV blocks over all GPUs: as given, or what the memory leaves."""
        if self.limits.num_gpu_blocks is not None:
            return self.limits.num_gpu_blocks
        return kv_blocks(**self.memory.model_dump(), tp=self.tp, block_size=self.limits.block_size)


def read_engine_file(path: Path) -> EngineFile:
    """Read and check one engine file.

    Raises:
        EngineSpecError: one line with the file, the key, the value and the bound.
    """
    data = _parse(path)
    if not isinstance(data, dict):
        names = {"NoneType": "an empty file", "str": "plain text", "list": "a list"}
        found = names.get(type(data).__name__, f"a {type(data).__name__}")
        raise EngineSpecError(
            str(path),
            value=found,
            bound="a mapping with name, model, tp, memory and coefficients",
            remedy="start from a shipped engine file",
        )
    try:
        file = EngineFile.model_validate(data)
    except ValidationError as error:
        raise _refusal(path, error) from None
    if file.blocks() < 1:
        raise EngineSpecError(
            str(path),
            key="memory.weights_gib",
            value=file.memory.weights_gib,
            bound="less than what the GPUs may use, less their overhead",
            remedy="raise tp, gpu_memory_gib or gpu_memory_utilization",
        )
    return file


def write_engine_file(file: EngineFile, path: Path) -> None:
    """Write one engine file as YAML.

    Raises:
        EngineSpecError: the file cannot be written.
    """
    text = yaml.safe_dump(
        file.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True, width=100
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EngineSpecError(
            str(path), value=error.strerror or "", bound="a writable file"
        ) from None


def _parse(path: Path) -> object:
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise EngineSpecError(
                str(path), value=f"{path.stat().st_size} bytes", bound="at most 1 MB"
            )
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise EngineSpecError(
            str(path), value="binary data", bound="UTF-8 text", remedy="give a YAML or JSON file"
        ) from None
    except OSError as error:
        raise EngineSpecError(
            str(path), value=error.strerror or "unreadable", bound="a readable engine file"
        ) from None
    try:
        return json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:160]
        raise EngineSpecError(
            str(path), value=reason, bound="YAML or JSON", remedy="mend the syntax"
        ) from None


def _refusal(path: Path, error: ValidationError) -> EngineSpecError:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return EngineSpecError(
            str(path), key=key, value="missing", bound="given", remedy=f"add {key}"
        )
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"][:-1])
        hint = did_you_mean(str(first["loc"][-1]), known) or f"known are {', '.join(known)}"
        return EngineSpecError(
            str(path), key=key, value="unknown key", bound="a known key", remedy=hint
        )
    if first["type"] == "value_error":
        return EngineSpecError(str(path), key=key, bound=message)
    return EngineSpecError(str(path), key=key, value=first["input"], bound=message)


def _known_keys(where: tuple[int | str, ...]) -> tuple[str, ...]:
    parts: dict[str, type[BaseModel]] = {
        "memory": EngineMemory,
        "limits": EngineLimits,
        "draft": DraftFile,
        "encoder": EncoderFile,
    }
    model = parts.get(str(where[0]), EngineFile) if where else EngineFile
    if model is EncoderFile and len(where) > 1:
        model = EncoderKindFile
    return tuple(model.model_fields)
