"""The Gymnasium environment over any engine: features, actions and reward.

Importing it registers `trimtab/Allocation-v0` where gymnasium is installed. The daemon's install
need not have it: nothing here but `allocation_env` needs it.
"""

from __future__ import annotations

import importlib.util
from typing import Final

ENVIRONMENT: Final = "trimtab/Allocation-v0"
"""The environment's name; its version rises when actions, observations or rewards change."""

if importlib.util.find_spec("gymnasium") is not None:
    import gymnasium

    if ENVIRONMENT not in gymnasium.registry:
        gymnasium.register(id=ENVIRONMENT, entry_point="trimtab.envs.allocation_env:AllocationEnv")
