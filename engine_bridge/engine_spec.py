"""What an engine is to the replay: coefficients, KV blocks, limits and price.

It finds an engine by its shipped name or by the path of an engine file
(`trimtab.engine_bridge.engine_file` reads those). It runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from trimtab.engine_bridge.draft_spec import DraftSpec
from trimtab.engine_bridge.encoder_spec import EncoderSpec
from trimtab.engine_bridge.engine_file import EngineFile, read_engine_file
from trimtab.engine_bridge.errors import EngineSpecError, did_you_mean
from trimtab.engine_bridge.step_time import COEFFICIENTS

if TYPE_CHECKING:
    from trimtab.engine_bridge.step_time import CoefArray

_ENGINES = Path(__file__).parent / "engines"
_SHIPPED = {
    "h100:llama-3.1-8b-tp1": "h100-llama-3.1-8b-tp1.yaml",
    "h100:llama-3.1-70b-tp4": "h100-llama-3.1-70b-tp4.yaml",
    "h100:llama-3.1-70b-tp8": "h100-llama-3.1-70b-tp8.yaml",
    "h100:qwen2.5-vl-7b-tp1": "h100-qwen2.5-vl-7b-tp1.yaml",
}
_FILE_ENDINGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine: a model on `tp` GPUs, with the limits of its scheduler."""

    name: str
    model: str
    gpu: str
    tp: int
    coefficients: tuple[float, ...]
    """Step-time coefficients in the order of `step_time.COEFFICIENTS`."""
    num_gpu_blocks: int
    """KV blocks over all GPUs together."""
    kv_bytes_per_token: int
    """KV cache of one token over all GPUs, bytes."""
    cost_per_hour: float
    """Price of the whole engine, USD an hour."""
    block_size: int = 16
    """Tokens in a KV block."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    """Whether a step is scheduled while the one before runs: it then knows of arrivals until the
    start of that one. vLLM's default on GPUs; without it the host's time adds to each step."""
    draft: DraftSpec | None = None
    """Its draft model; None: it drafts nothing."""
    encoder: EncoderSpec | None = None
    """Its vision and audio encoders; None: media cost it nothing beyond their prompt tokens."""
    fidelity: dict[str, Any] = field(default_factory=dict, hash=False)
    """Where the coefficients come from and how well they fit."""

    @property
    def coef(self) -> CoefArray:
        """The coefficients as a new float64 array, shape (COEF_LEN,)."""
        return np.array(self.coefficients, np.float64)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_gpu_blocks * self.block_size

    def with_limits(
        self,
        *,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        num_gpu_blocks: int | None = None,
        block_size: int | None = None,
        enable_prefix_caching: bool | None = None,
        async_scheduling: bool | None = None,
    ) -> Self:
        """The same engine under other limits; None keeps one.

        A new `block_size` without `num_gpu_blocks` keeps the capacity in tokens (rounded down).

        Raises:
            EngineSpecError: a limit below 1, or a cache of no block.
        """
        given: dict[str, int | None] = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "num_gpu_blocks": num_gpu_blocks,
            "block_size": block_size,
        }
        changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        for key, value in changes.items():
            if value < 1:
                raise EngineSpecError(
                    f"engine {self.name}", key=key, value=value, bound="at least 1"
                )
        if block_size is not None and num_gpu_blocks is None:
            changes["num_gpu_blocks"] = self.kv_tokens // block_size
            if changes["num_gpu_blocks"] < 1:
                raise EngineSpecError(
                    f"engine {self.name}",
                    key="block_size",
                    value=block_size,
                    bound=f"at most {self.kv_tokens}, the KV cache in tokens",
                    remedy="give num_gpu_blocks too",
                )
        if enable_prefix_caching is not None:
            changes["enable_prefix_caching"] = enable_prefix_caching
        if async_scheduling is not None:
            changes["async_scheduling"] = async_scheduling
        return replace(self, **changes)

    def check_draft(self) -> None:
        """Refuse drafts that the replay's step does not fit.

        Raises:
            EngineSpecError: a decode could need two blocks at once, or the decodes of a full batch
                more tokens than a step may carry.
        """
        if self.draft is None:
            return
        most = min(self.block_size, self.max_num_batched_tokens // self.max_num_seqs) - 1
        if self.draft.tokens > most:
            raise EngineSpecError(
                f"engine {self.name}",
                key="draft.tokens",
                value=self.draft.tokens,
                bound=f"at most {most}: with the next token, a block of {self.block_size} and "
                f"{self.max_num_batched_tokens} tokens for {self.max_num_seqs} requests",
                remedy="draft less, or raise block_size or max_num_batched_tokens",
            )


def engine_names() -> tuple[str, ...]:
    """The names of the engines that come with the package."""
    return tuple(_SHIPPED)


def get_engine_spec(name_or_path: str | Path) -> EngineSpec:
    """The engine of a shipped name, or of a YAML or JSON engine file.

    Raises:
        EngineSpecError: no such name or file, or a bad file: names the key, value and bound.
    """
    return _spec(find_engine_file(name_or_path))


def find_engine_file(name_or_path: str | Path) -> EngineFile:
    """The checked content of a shipped engine's file, or of the file at a path.

    Raises:
        EngineSpecError: as `get_engine_spec`.
    """
    text = str(name_or_path)
    if text in _SHIPPED:
        return read_engine_file(_ENGINES / _SHIPPED[text])
    path = Path(text)
    if path.suffix.lower() in _FILE_ENDINGS or path.is_file():
        return read_engine_file(path)
    raise EngineSpecError(
        "engine",
        value=text,
        bound=f"one of {', '.join(_SHIPPED)}, or an engine file",
        remedy=did_you_mean(text, _SHIPPED) or "give the path of a .yaml or .json engine file",
    )


def _spec(file: EngineFile) -> EngineSpec:
    limits = file.limits
    return EngineSpec(
        name=file.name,
        model=file.model,
        gpu=file.gpu,
        tp=file.tp,
        coefficients=tuple(file.coefficients[name] for name, _, _ in COEFFICIENTS),
        num_gpu_blocks=file.blocks(),
        kv_bytes_per_token=round(file.memory.kv_kib_per_token * 1024),
        cost_per_hour=file.cost_usd_per_gpu_hour * file.tp,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        enable_prefix_caching=limits.enable_prefix_caching,
        draft=None if file.draft is None else DraftSpec.of(file.draft),
        encoder=None if file.encoder is None else EncoderSpec.of(file.encoder),
        fidelity=dict(file.fidelity),
    )
