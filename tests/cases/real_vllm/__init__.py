"""The cases again on vLLM's own scheduler and KV cache manager, in virtual time."""

import os

# vLLM looks for a device when it is first imported; these tests need none.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
