"""Where the scheduler leans on vLLM, and for which versions and set-ups that holds.

vLLM's scheduler interface is not public. What `scheduler`, `requests`, `block_queue` and
`media_books` override, call or replace is listed here with its signature; a start on another vLLM
is refused with one line instead of failing in the middle of a step. A contract test holds the list
against the installed vLLM.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

from trimtab.engine_bridge.errors import InputError

SUPPORTED: Final = ("0.32", "0.33")
"""Versions of vLLM, without the patch level, that the seams were checked on."""


class SeamError(InputError):
    """This vLLM, or the way it was started, is not supported."""


METHODS: Final[dict[str, tuple[str, ...]]] = {
    "schedule": ("self", "throttle_prefills"),
    "update_from_output": ("self", "scheduler_output", "model_runner_output"),
    "update_draft_token_ids": ("self", "draft_token_ids"),
    "finish_requests": ("self", "request_ids", "finished_status"),
    "_preempt_request": ("self", "request", "timestamp", "drop_stale_output"),
    "_free_request": ("self", "request", "delay_free_blocks"),
    "_free_request_blocks": ("self", "request"),
    "_get_local_prefix_cache_hit": ("self", "request"),
    "_reserve_prefill_lookahead": (
        "self",
        "request",
        "num_computed_tokens",
        "num_new_tokens",
    ),
    "_try_schedule_encoder_inputs": (
        "self",
        "request",
        "num_computed_tokens",
        "num_new_tokens",
        "encoder_compute_budget",
        "shift_computed_tokens",
    ),
    "_free_encoder_inputs": ("self", "request"),
    "_handle_blocked_waiting_request": ("self", "request"),
    "_is_blocked_waiting_status": ("status",),
    "_update_after_schedule": ("self", "scheduler_output"),
}
"""Methods of vLLM's scheduler that are overridden or called, with their parameters."""
MANAGER: Final[dict[str, tuple[str, ...]]] = {
    "get_computed_blocks": ("self", "request"),
    "get_blocks": ("self", "request_id"),
    "cache_blocks": ("self", "request", "num_computed_tokens"),
}
"""Likewise of its KV-cache manager; of `allocate_slots` only `ALLOCATE` is used."""
ALLOCATE: Final = (
    "request",
    "num_new_tokens",
    "num_new_computed_tokens",
    "new_computed_blocks",
    "num_lookahead_tokens",
)
POOL: Final[dict[str, tuple[str, ...]]] = {
    "get_new_blocks": ("self", "num_blocks"),
    "touch": ("self", "blocks"),
    "free_blocks": ("self", "ordered_blocks"),
    "_maybe_evict_cached_block": ("self", "block"),
    "get_num_free_blocks": ("self",),
}
"""Likewise of its block pool."""
ENCODER: Final[dict[str, tuple[str, ...]]] = {
    "check_and_update_cache": ("self", "request", "input_id"),
    "free": ("self", "request"),
}
"""Likewise of its encoder cache; `ENCODER_FIELDS` are read."""
ENCODER_FIELDS: Final = ("cached", "cache_size", "num_free_slots", "num_freeable_slots")
ADDED: Final = ("max_cache_hit_length",)
"""Parameters with defaults that 0.33 has and 0.32 has not; none is used."""


def _parameters(owner: Any, name: str) -> tuple[str, ...] | None:
    method = inspect.getattr_static(owner, name, None)
    if method is None:
        return None
    parameters = inspect.signature(getattr(owner, name)).parameters
    return tuple(parameter for parameter in parameters if parameter not in ADDED)


def changed_seams(scheduler: Any, manager: Any, pool: Any, encoder: Any) -> list[str]:
    """Seams of these classes that are not as they should be, each with what was found.

    Args:
        scheduler: vLLM's `Scheduler` class.
        manager: Its `KVCacheManager` class.
        pool: Its `BlockPool` class.
        encoder: Its `EncoderCacheManager` class.
    """
    faults = []
    owners = ((scheduler, METHODS), (manager, MANAGER), (pool, POOL), (encoder, ENCODER))
    for owner, seams in owners:
        for name, expected in seams.items():
            found = _parameters(owner, name)
            if found != expected:
                faults.append(f"{owner.__name__}.{name}{found}, expected {expected}")
    allocate = _parameters(manager, "allocate_slots") or ()
    missing = [name for name in ALLOCATE if name not in allocate]
    if missing:
        faults.append(f"{manager.__name__}.allocate_slots lacks {', '.join(missing)}")
    return faults


def check_version(version: str) -> None:
    """Refuse a vLLM whose seams nobody has looked at.

    Raises:
        SeamError: with the version found and those supported.
    """
    release = ".".join(version.split("+")[0].split(".")[:2])
    if release not in SUPPORTED:
        raise SeamError(
            "vLLM",
            key="version",
            value=version,
            bound=f"one of {', '.join(SUPPORTED)}",
            remedy="install a supported one, or start without --scheduler-cls",
        )


def check_installed(version: str) -> list[str]:
    """Seams of the installed vLLM that are not as they should be; it imports vLLM.

    Args:
        version: The installed version.

    Raises:
        SeamError: nobody has looked at that version.
        ImportError: vLLM cannot be imported.
    """
    check_version(version)
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    return changed_seams(Scheduler, KVCacheManager, BlockPool, EncoderCacheManager)


def check_engine(scheduler: Any) -> None:
    """Refuse a vLLM, or a way of starting it, that the scheduler does not support.

    Args:
        scheduler: An initialised vLLM scheduler.

    Raises:
        SeamError: one line with what is not supported and the remedy.
    """
    import vllm

    encoder = scheduler.encoder_cache_manager
    faults = check_installed(vllm.__version__)
    faults += [
        f"{type(encoder).__name__} lacks {name}"
        for name in ENCODER_FIELDS
        # An encoder-decoder model's cache is another one; it is refused as such below.
        if not scheduler.is_encoder_decoder and not hasattr(encoder, name)
    ]
    if faults:
        raise SeamError("vLLM", key="seam", value=faults[0], bound="as in a released 0.32 or 0.33")
    config = scheduler.vllm_config
    groups = len(scheduler.kv_cache_config.kv_cache_groups)
    for key, value, bound in (
        ("--kv-transfer-config", scheduler.connector is not None, False),
        ("--ec-transfer-config", getattr(scheduler, "ec_connector", None) is not None, False),
        ("--pipeline-parallel-size", config.parallel_config.pipeline_parallel_size, 1),
        (
            "--decode-context-parallel-size",
            config.parallel_config.decode_context_parallel_size,
            1,
        ),
        ("KV-cache groups of the model", groups, 1),
        ("encoder-decoder model", scheduler.is_encoder_decoder, False),
        (
            "--long-prefill-token-threshold",
            scheduler.scheduler_config.long_prefill_token_threshold,
            0,
        ),
        (
            "--prefill-schedule-interval",
            getattr(scheduler.scheduler_config, "prefill_schedule_interval", 1),
            1,
        ),
        (
            "--disable-chunked-mm-input",
            scheduler.scheduler_config.disable_chunked_mm_input,
            False,
        ),
        ("--enable-chunked-prefill", scheduler.scheduler_config.enable_chunked_prefill, True),
    ):
        if value != bound:
            raise SeamError(
                "vLLM with the fair scheduler",
                key=key,
                value=value,
                bound=str(bound),
                remedy="leave it out, or start without --scheduler-cls",
            )
