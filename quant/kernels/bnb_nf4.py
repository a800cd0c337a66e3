"""4-bit NormalFloat weights wherever bitsandbytes runs: its CPU kernel called directly, else its own module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quant._bitsandbytes import bitsandbytes
from quant.kernels import nf4
from quant.kernels.base import QuantizedLinear, narrowed_note, notes, padding_note
from quant.kernels.nf4 import BLOCK, Nf4Linear
from quant.plan import LinearSite, Setting, Storage, warn_once

UNPACKED = "bitsandbytes nf4, unpacked at each product"
ON_CUDA = "bitsandbytes nf4 (CUDA)"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class BnbNf4Linear(QuantizedLinear):
    """The library's module: on CUDA, and on processors for which it has no kernel. An absmax is in float32."""

    row_invariant = None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.bias = None  # the library's module has it
        device, dtype = linear.weight.device, linear.weight.dtype
        self.kernel = ON_CUDA if device.type == "cuda" else UNPACKED  # type: ignore[misc]
        library = bitsandbytes().nn
        inner = library.Linear4bit(
            self.in_features,
            self.out_features,
            bias=linear.bias is not None,
            compute_dtype=dtype,
            quant_type="nf4",
            device="meta",
        )
        inner.weight = library.Params4bit(
            linear.weight.detach(), compress_statistics=False, quant_type="nf4", module=inner
        )
        inner.bias = linear.bias
        self.inner = inner.to(device).eval()  # the move is what quantizes

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.inner(inputs)
        return output

    def rows(self, ids: Tensor) -> Tensor:
        weight = self.inner.weight
        width = self.in_features
        halves = weight.data.view(torch.uint8).view(self.out_features, width // 2)[ids]
        codes = torch.stack([halves >> 4, halves & 15], -1).flatten(-2).long()
        absmax = weight.quant_state.absmax.view(self.out_features, -1)[ids].unsqueeze(-1)
        values = weight.quant_state.code[codes].unflatten(-1, (-1, BLOCK))
        return (values * absmax).flatten(-2).to(self.inner.compute_dtype)


def nf4_storage(site: LinearSite, setting: Setting) -> Storage:
    """How a layer will be stored as NF4 on this device; says in the log where that will be slow.

    Raises ValueError, in one line, for a dtype that the library doesn't multiply, and for a tied head whose rows begin
    within a block.
    """
    keeps_rows = bool(site.embedding)
    if setting.dtype not in DTYPES:
        name = str(setting.dtype).removeprefix("torch.")
        raise ValueError(f"bitsandbytes has no products of {name} activations; use dtype=bf16")
    if setting.device.type == "cpu" and nf4.is_native():
        stored = Nf4Linear.stored_bytes(*site.shape, keeps_rows=keeps_rows)
        padding = padding_note(site.shape, nf4.OUTPUTS_MULTIPLE, BLOCK)
        note = notes(padding, narrowed_note(setting.dtype))
        return Storage(Nf4Linear.kernel, stored, Nf4Linear.row_invariant, note)
    if keeps_rows and site.inputs % BLOCK:
        raise ValueError(f"its rows are no multiple of {BLOCK} long; use weights.head=false")
    num_weights = site.outputs * site.inputs
    stored = (num_weights + 1) // 2 + 4 * -(-num_weights // BLOCK) + 4 * 16
    if setting.device.type == "cuda":
        return Storage(ON_CUDA, stored, BnbNf4Linear.row_invariant)
    warn_once(
        "this processor lacks bf16 instructions: NF4 weights are unpacked at each product, which is slow"
    )
    return Storage(UNPACKED, stored, BnbNf4Linear.row_invariant, "slow: no kernel for this processor")


def nf4_layer(linear: nn.Linear, *, keeps_rows: bool) -> QuantizedLinear:
    if linear.weight.device.type == "cpu" and nf4.is_native():
        return Nf4Linear(linear, keeps_rows=keeps_rows)
    return BnbNf4Linear(linear)
