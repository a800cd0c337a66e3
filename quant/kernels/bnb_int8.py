"""LLM.int8 by bitsandbytes (Dettmers et al. 2022, arXiv 2208.07339): its own module around its own products.

8-bit weights and activations, but columns of the activations that hold an outlier are multiplied in 16 bits. Which
columns those are is decided for all tokens of a pass together, so a token's result depends on its batch mates. On a CPU
the library's matrix product is torch's (`_int_mm`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quant._bitsandbytes import bitsandbytes
from quant.kernels.base import QuantizedLinear
from quant.plan import LinearSite, Setting, Storage

LLM_INT8 = "bitsandbytes LLM.int8"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
THRESHOLD = 6.0  # the paper's


class BnbInt8Linear(QuantizedLinear):
    """Codes row by row, and the largest weight of each row in float32."""

    kernel = LLM_INT8
    row_invariant = False

    def __init__(self, linear: nn.Linear, threshold: float = THRESHOLD) -> None:
        super().__init__(linear)
        self.bias = None  # the library's module has it
        library = bitsandbytes().nn
        inner = library.Linear8bitLt(
            self.in_features,
            self.out_features,
            bias=linear.bias is not None,
            has_fp16_weights=False,
            threshold=threshold,
            device="meta",
        )
        # From the CPU: it is this move that quantizes, and it doesn't on a weight that is on CUDA already.
        weight = library.Int8Params(linear.weight.detach().cpu(), requires_grad=False)
        inner.weight = weight.to(linear.weight.device)
        inner.bias = linear.bias
        inner.init_8bit_state()
        self.inner = inner.eval()

    @staticmethod
    def storage(site: LinearSite, setting: Setting) -> Storage:
        """Raises ValueError for a dtype that the library doesn't multiply."""
        if setting.dtype not in DTYPES:
            name = str(setting.dtype).removeprefix("torch.")
            raise ValueError(f"bitsandbytes has no products of {name} activations; use dtype=bf16")
        stored = site.outputs * (site.inputs + 4)
        return Storage(LLM_INT8, stored, BnbInt8Linear.row_invariant)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.inner(inputs)
        return output

    def rows(self, ids: Tensor) -> Tensor:
        state = self.inner.state
        steps = state.SCB[ids].unsqueeze(-1) / 127
        return (state.CB[ids].float() * steps).to(self.dtype)
