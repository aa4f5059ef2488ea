"""The platform of an emulated engine: vLLM's CPU platform without its limits on scheduling.

The CPU platform turns asynchronous scheduling off and prefers its own block size; an emulated GPU
must be scheduled as a GPU is. vLLM loads this through `emulated_platform` and only if asked.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform


class EmulatedPlatform(CpuPlatform):
    """A CPU that is scheduled like a GPU."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Do what the CPU platform does, but keep asynchronous scheduling as it was resolved."""
        scheduler_config = vllm_config.scheduler_config
        asynchronous = scheduler_config.async_scheduling
        super().check_and_update_config(vllm_config)
        scheduler_config.async_scheduling = asynchronous

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None:
        """Keep the block size: no attention kernel runs that could ask for another."""

    @classmethod
    def import_kernels(cls) -> None:
        """Import none: the GPU build of vLLM has no CPU kernels, and none are called."""
