"""bitsandbytes, imported where it is used (it is slow), and kept from running code of a model hub.

Where the processor has bf16 instructions its import asks the package `kernels`, if installed, for a compiled kernel
from a hub, and warns if it can't have one. The formats here mean the library's own kernels.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any


def bitsandbytes() -> Any:
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # It says at every product that 8-bit activations pass through float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    before = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]  # makes its import fail
    try:
        return importlib.import_module("bitsandbytes")
    finally:
        if before is None:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = before
