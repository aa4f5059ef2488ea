"""Keeps the hot functions plain Python in processes that call few of them, like the gateway.

Numba takes a second or more to import, and some 150 MB. The results are the same bit for bit.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Final

SWITCH: Final = "NUMBA_DISABLE_JIT"
"""Numba's own environment variable; other processes that this one starts do not see it set."""
_COMPILER: Final = "trimtab.engine_bridge.compiled"


def keep_uncompiled() -> None:
    """Call it before anything that uses step times is imported; later it changes nothing."""
    if _COMPILER in sys.modules:
        return
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    try:
        importlib.import_module(_COMPILER)
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before
