"""optimum-quanto's quantized tensors (`qint8`, `qint4`), multiplied by whatever the library multiplies them with.

On a CPU and in bfloat16 that is torch's int8pack and int4pack. The library asks for a multiple of 4 inputs before it
calls int8pack, which ends the process with less than a multiple of 16, and it calls int4pack for groups of 128 only (by
itself it makes groups of 96 of 576 inputs, and unpacks those at each product): layers are padded to what the kernels
take. In other dtypes weights are dequantized at each product, those of 4 bits by a C++ extension that is compiled then.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels.base import QuantizedLinear, flat_rows, padded_to, padded_weight, padding_note, shaped
from quant.kernels.int4pack import BLOCK_ROWS, OUTPUTS_MULTIPLE, check_rows, grouped_rows
from quant.kernels.int4pack import pack as pack_int4
from quant.kernels.int8pack import INPUTS_MULTIPLE
from quant.kernels.packed_rows import PackedRows
from quant.plan import LinearSite, Setting, Storage, warn_once

GROUP = 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NATIVE = {8: "quanto: torch int8pack", 4: "quanto: torch int4pack"}
DEQUANTIZED = "quanto: dequantized at each product"


class QuantoLinear(QuantizedLinear):
    """`weight` is the library's tensor, padded; `bits` 8 with a scale per output, 4 with scale and shift per 128."""

    weight: Any

    def __init__(self, linear: nn.Linear, bits: int, *, keeps_rows: bool = False) -> None:
        super().__init__(linear)
        self.bits = bits
        self.kernel = kernel_of(bits, linear.weight.device, self.dtype)  # type: ignore[misc]
        self.row_invariant = is_row_invariant(self.kernel)  # type: ignore[misc]
        weight = padded_weight(linear, *_multiples(bits, keeps_rows))
        self.padded_shape = (weight.shape[0], weight.shape[1])
        self.weight = nn.Parameter(_quantized(weight, bits), requires_grad=False)
        has_places = bits == 4 and keeps_rows
        places = PackedRows(pack_int4, BLOCK_ROWS, self.padded_shape[1]).places if has_places else None
        self.register_buffer("places", places)
        if places is not None:
            found = _codes_in_order(self.weight, self.padded_shape)
            check_rows(self.weight._data._data, places, found)
        if self.kernel == DEQUANTIZED:  # compiles what it needs now, not in a timed region
            self.forward(torch.zeros(1, self.in_features, dtype=self.dtype, device=linear.weight.device))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.bits == 4 and self.kernel == DEQUANTIZED and torch.is_inference_mode_enabled():
            raise ValueError(
                "quanto's 4-bit weights can't be unpacked in inference_mode: use torch.no_grad()"
            )
        rows = flat_rows(inputs, self.in_features, self.padded_shape[1])
        output = nn.functional.linear(rows, self.weight)
        return shaped(output, inputs, self.out_features, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        if self.bits == 8:
            return (self.weight._data[ids].to(self.dtype) * self.weight._scale[ids])[..., : self.in_features]
        values = grouped_rows(
            self.weight._data._data, self.get_buffer("places"), self.weight._scale_shift, GROUP, ids
        )
        return values[..., : self.in_features].to(self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantoLinear:
        raise ValueError("optimum-quanto's tensors can't be copied: convert another float model")


def quanto_storage(site: LinearSite, setting: Setting, bits: int) -> Storage:
    """How a layer will be stored. A slow way to multiply is said in the log.

    Raises ValueError, in one line, for a dtype that the library doesn't quantize, for a tied 4-bit head where its rows
    can't be looked up, and where a compiler is needed and there is none.
    """
    if setting.dtype not in DTYPES:
        name = str(setting.dtype).removeprefix("torch.")
        raise ValueError(f"optimum-quanto doesn't quantize {name} weights; use dtype=bf16")
    kernel = kernel_of(bits, setting.device, setting.dtype)
    keeps_rows = bool(site.embedding)
    if bits == 4 and keeps_rows and kernel != NATIVE[4]:
        raise ValueError(
            "rows of an embedding can't be looked up in it; use dtype=bf16 or weights.head=false"
        )
    multiples = _multiples(bits, keeps_rows)
    rows, width = map(padded_to, site.shape, multiples)
    if bits == 8:
        stored = rows * width + rows * setting.dtype.itemsize
    else:
        stored = rows * width // 2 + 2 * setting.dtype.itemsize * rows * (width // GROUP)
        stored += 4 * BLOCK_ROWS * width if keeps_rows else 0
    notes = [padding_note(site.shape, *multiples)]
    if kernel == DEQUANTIZED:
        warn_once(f"{kernel}, which is slow; dtype=bf16 has a kernel on a CPU")
        notes.append("slow: no kernel for this dtype or device")
        if bits == 4 and setting.device.type == "cpu":
            _need_compiler()
    return Storage(kernel, stored, is_row_invariant(kernel), "; ".join(filter(None, notes)))


def kernel_of(bits: int, device: torch.device, dtype: torch.dtype) -> str:
    return NATIVE[bits] if device.type == "cpu" and dtype is torch.bfloat16 else DEQUANTIZED


def is_row_invariant(kernel: str) -> bool:
    """A dequantized weight is multiplied by torch's float kernels, which round by the shape of a pass."""
    return kernel != DEQUANTIZED


def _multiples(bits: int, keeps_rows: bool) -> tuple[int, int]:
    """Of outputs and inputs."""
    if bits == 8:
        return 1, INPUTS_MULTIPLE
    return (BLOCK_ROWS if keeps_rows else OUTPUTS_MULTIPLE), GROUP


def _quantized(weight: Tensor, bits: int) -> Tensor:
    quanto = library()
    found: Tensor
    if bits == 8:
        scale = quanto.AbsmaxOptimizer()(weight, qtype=quanto.qint8, axis=0)
        found = quanto.quantize_weight(weight, qtype=quanto.qint8, axis=0, scale=scale)
    else:
        kind = {"qtype": quanto.qint4, "axis": 0, "group_size": GROUP}
        scale, shift = quanto.MaxOptimizer()(weight, **kind)
        found = quanto.quantize_weight(weight, scale=scale, shift=shift, **kind)
    return found


def library() -> Any:
    """`optimum.quanto`, imported where it is used (it is slow, and brings setuptools along)."""
    with warnings.catch_warnings(), _distutils_as_it_is():
        warnings.simplefilter("ignore")  # of distutils, in several ways
        return importlib.import_module("optimum.quanto")


@contextmanager
def _distutils_as_it_is() -> Iterator[None]:
    """Lets setuptools take the standard library's distutils where its own no longer comes first.

    That is so once anything in the process has looked for pip, and its import would then fail.
    """
    name = "SETUPTOOLS_USE_DISTUTILS"
    spec = importlib.util.find_spec("distutils") if sys.version_info < (3, 12) else None
    if spec is None or "setuptools" in (spec.origin or "") or name in os.environ:
        yield
        return
    os.environ[name] = "stdlib"
    try:
        yield
    finally:
        del os.environ[name]


def _codes_in_order(weight: Any, shape: tuple[int, int]) -> Tensor:
    """Codes `[N, K]` (int32), by the library's own way to unpack them."""
    codes: Tensor = weight._data.unpack()
    return codes.view(shape).to(torch.int32)


def _need_compiler() -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None or shutil.which("ninja") is None:
        raise ValueError(
            "optimum-quanto compiles an extension to unpack 4-bit weights in this dtype, and there is no "
            f"{compiler} or no ninja; use dtype=bf16, which needs none"
        )
