"""8-bit weights, a scale per output, by the fastest kernel that is right on this device.

On a CPU one of torch's own: `torch_int8pack` (weight-only) or `onednn_u8s8` (activations rounded token by token),
chosen by what they cost here; on CUDA bitsandbytes' LLM.int8. Stored: a byte a weight and the scales, all of it read by
a pass; rows of a tied embedding are looked up in the head's codes, of which `onednn_u8s8` keeps a second copy for that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch import nn

from quant.kernels.base import QuantizedLinear, padding_note
from quant.kernels.bnb_int8 import LLM_INT8, BnbInt8Linear
from quant.kernels.choice import Candidate, Choice, choose
from quant.kernels.int8pack import INPUTS_MULTIPLE, Int8PackLinear
from quant.kernels.onednn_u8s8 import OneDnnLinear
from quant.plan import LinearSite, Setting, Storage, WeightsPlan
from quant.primitives import quantize_rows
from quant.weights.base import QuantizedWeights

CANDIDATES = {
    "torch_int8pack": Candidate(
        Int8PackLinear.kernel,
        Int8PackLinear,
        lambda linear: quantize_rows(linear.weight, linear.weight.dtype).dequantized(),
    ),
    "onednn_u8s8": Candidate(
        OneDnnLinear.kernel, OneDnnLinear, lambda linear: quantize_rows(linear.weight).dequantized()
    ),
}
KERNELS = ("auto", *CANDIDATES, "bnb_llm_int8")


@dataclass
class Int8Weights(QuantizedWeights):
    """`kernel`: `auto`, or one of those above by name, `bnb_llm_int8` being that of CUDA."""

    kernel: str = "auto"

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"weights.kernel={self.kernel}: expected one of {', '.join(KERNELS)}")

    def storage(self, site: LinearSite, setting: Setting) -> Storage:
        choice = self._choice(setting)
        has_lookup = bool(site.embedding)
        if choice.name == LLM_INT8:
            return BnbInt8Linear.storage(site, setting)
        if choice.name == OneDnnLinear.kernel:
            stored = OneDnnLinear.stored_bytes(*site.shape, keeps_rows=has_lookup)
            note = (
                ""
                if not has_lookup
                else "codes stored twice: packed for the head, row by row for the embedding"
            )
            return Storage(choice.name, stored, OneDnnLinear.row_invariant, note)
        stored = Int8PackLinear.stored_bytes(*site.shape, setting.dtype)
        note = padding_note(site.shape, 1, INPUTS_MULTIPLE)
        return Storage(choice.name, stored, Int8PackLinear.row_invariant, note)

    def layer(self, linear: nn.Linear, site: LinearSite, setting: Setting) -> QuantizedLinear:
        name = self._choice(setting).name
        if name == LLM_INT8:
            return BnbInt8Linear(linear)
        if name == OneDnnLinear.kernel:
            return OneDnnLinear(linear, keeps_rows=bool(site.embedding))
        return Int8PackLinear(linear)

    def resolved(self, plan: WeightsPlan) -> Self:
        names = {one.name: name for name, one in CANDIDATES.items()} | {LLM_INT8: "bnb_llm_int8"}
        return replace(self, kernel=names[plan.kernels[0]])

    def choice(self, setting: Setting) -> str:
        return str(self._choice(setting))

    def _choice(self, setting: Setting) -> Choice:
        on_cpu = setting.device.type == "cpu"
        if self.kernel == "bnb_llm_int8" or (self.kernel == "auto" and not on_cpu):
            return Choice(LLM_INT8)
        if not on_cpu:
            raise ValueError(
                f"weights.kernel={self.kernel} runs on a CPU; on {setting.device.type} use weights.kernel=auto"
            )
        wanted = CANDIDATES.values() if self.kernel == "auto" else [CANDIDATES[self.kernel]]
        return choose(list(wanted), setting.typical_shape, setting.dtype)
