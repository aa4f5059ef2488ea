"""vLLM is what the scheduler takes it for, and whatever else is refused with one line."""

from __future__ import annotations

from types import SimpleNamespace as Fields
from typing import Any

import pytest

pytest.importorskip("vllm", reason="looks at vLLM's own classes")

from trimtab.engine_bridge.vllm import virtual_time  # noqa: F401  isort: skip (no GPU)
import vllm
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from trimtab.engine_bridge.vllm.seams import (
    METHODS,
    SeamError,
    changed_seams,
    check_engine,
    check_version,
)


def engine(**changed: Any) -> Any:
    """What `check_engine` looks at, of a supported set-up but for some fields."""
    fields = {
        "connector": None,
        "ec_connector": None,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "groups": 1,
        "is_encoder_decoder": False,
        "long_prefill_token_threshold": 0,
        "prefill_schedule_interval": 1,
        "enable_chunked_prefill": True,
        "disable_chunked_mm_input": False,
        "encoder_cache_manager": EncoderCacheManager(cache_size=10),
    } | changed
    return Fields(
        connector=fields["connector"],
        ec_connector=fields["ec_connector"],
        encoder_cache_manager=fields["encoder_cache_manager"],
        is_encoder_decoder=fields["is_encoder_decoder"],
        vllm_config=Fields(
            parallel_config=Fields(
                pipeline_parallel_size=fields["pipeline_parallel_size"],
                decode_context_parallel_size=fields["decode_context_parallel_size"],
            )
        ),
        kv_cache_config=Fields(kv_cache_groups=[None] * fields["groups"]),
        scheduler_config=Fields(
            long_prefill_token_threshold=fields["long_prefill_token_threshold"],
            prefill_schedule_interval=fields["prefill_schedule_interval"],
            enable_chunked_prefill=fields["enable_chunked_prefill"],
            disable_chunked_mm_input=fields["disable_chunked_mm_input"],
        ),
    )


def test_the_installed_vllm_is_as_expected() -> None:
    assert changed_seams(Scheduler, KVCacheManager, BlockPool, EncoderCacheManager) == []
    check_engine(engine())


def test_what_is_overridden_is_listed() -> None:
    from trimtab.engine_bridge.vllm import FairScheduler

    overridden = {name for name in vars(FairScheduler) if hasattr(AsyncScheduler, name)}
    ours = {name for name in overridden if not name.startswith("__")} - {"shutdown", "_abc_impl"}
    assert ours <= set(METHODS)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("schedule", lambda self: None),
        ("_preempt_request", lambda self, request, timestamp: None),
        ("_free_request_blocks", lambda self, request, later=False: None),
    ],
)
def test_a_changed_method_is_named(name: str, method: Any) -> None:
    changed = type("Scheduler", (Scheduler,), {name: method})
    faults = changed_seams(changed, KVCacheManager, BlockPool, EncoderCacheManager)
    assert len(faults) == 1
    assert faults[0].startswith(f"Scheduler.{name}(")


def test_a_method_that_has_gone_is_named() -> None:
    gone = type("BlockPool", (), {})
    faults = changed_seams(Scheduler, KVCacheManager, gone, EncoderCacheManager)
    assert any(fault.startswith("BlockPool.touchNone") or "touch" in fault for fault in faults)


def test_a_changed_signature_refuses_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "touch", lambda self, blocks, when: None)
    with pytest.raises(SeamError) as refused:
        check_engine(engine())
    assert "BlockPool.touch" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_encoder_cache_of_another_kind_is_refused() -> None:
    class Foreign(EncoderCacheManager):
        def __init__(self) -> None:
            """None of the fields that are read."""

    with pytest.raises(SeamError, match="Foreign lacks cached"):
        check_engine(engine(encoder_cache_manager=Foreign()))


def test_an_encoder_decoder_model_is_refused_as_such() -> None:
    cache = EncoderDecoderCacheManager(cache_size=10)
    with pytest.raises(SeamError, match="encoder-decoder model"):
        check_engine(engine(is_encoder_decoder=True, encoder_cache_manager=cache))


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.2.post1"])
def test_supported_versions(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "1.0", "dev"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(SeamError) as refused:
        check_engine(engine())
    text = str(refused.value)
    assert version in text
    assert "0.32, 0.33" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("field", "value", "key"),
    [
        ("connector", object(), "--kv-transfer-config"),
        ("ec_connector", object(), "--ec-transfer-config"),
        ("pipeline_parallel_size", 2, "--pipeline-parallel-size"),
        ("decode_context_parallel_size", 2, "--decode-context-parallel-size"),
        ("groups", 2, "KV-cache groups"),
        ("groups", 0, "KV-cache groups"),
        ("is_encoder_decoder", True, "encoder-decoder"),
        ("long_prefill_token_threshold", 256, "--long-prefill-token-threshold"),
        ("prefill_schedule_interval", 4, "--prefill-schedule-interval"),
        ("enable_chunked_prefill", False, "--enable-chunked-prefill"),
        ("disable_chunked_mm_input", True, "--disable-chunked-mm-input"),
    ],
)
def test_what_is_not_supported_is_refused_with_one_line(field: str, value: Any, key: str) -> None:
    with pytest.raises(SeamError) as refused:
        check_engine(engine(**{field: value}))
    text = str(refused.value)
    assert key in text
    assert "--scheduler-cls" in text
    assert "\n" not in text
