"""The plug-in for vLLM: the fair scheduler, the identity of requests, control, logs and emulation.

Importing the package needs no vLLM: only what must run inside it (`scheduler`, `executor`,
`platform`) imports it. `FairScheduler` is looked up when it is asked for, so that
`--scheduler-cls trimtab.engine_bridge.vllm.FairScheduler` finds it here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trimtab.engine_bridge.vllm.scheduler import FairScheduler

__all__ = ["EMULATE", "FairScheduler", "emulated_platform"]

EMULATE: Final = "TRIMTAB_EMULATE"
"""Environment variable that asks vLLM for the emulated platform; `1` is yes."""


def emulated_platform() -> str | None:
    """Where vLLM finds the emulated platform: an entry point of the group `vllm.platform_plugins`.

    Returns:
        The name of the class if `EMULATE` asks for it; None leaves the host's own platform alone.
    """
    if os.environ.get(EMULATE) == "1":
        return "trimtab.engine_bridge.vllm.platform.EmulatedPlatform"
    return None


def __getattr__(name: str) -> Any:
    if name == "FairScheduler":
        from trimtab.engine_bridge.vllm.scheduler import FairScheduler

        return FairScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
