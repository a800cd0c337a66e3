"""4-bit weights in groups, by the fastest kernel that is right on this device.

On a CPU `torch_int4pack` (a scale and an offset per group, 16 bits each) or `bnb_nf4` (NormalFloat codes, an absmax
per 64), chosen by what they cost here; on CUDA bitsandbytes' NF4. Stored: half a byte a weight and scales, all of it
read by a pass; rows of a tied embedding are unpacked from the head's codes, for which a table of places is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor, nn

from quant.kernels import nf4
from quant.kernels.base import QuantizedLinear, narrowed_note, notes, padded_weight, padding_note
from quant.kernels.bnb_nf4 import nf4_layer, nf4_storage
from quant.kernels.choice import Candidate, Choice, choose
from quant.kernels.int4pack import BITS, GROUPS, Int4PackLinear, outputs_multiple
from quant.plan import LinearSite, Setting, Storage, WeightsPlan
from quant.primitives import quantize_centred
from quant.weights.base import QuantizedWeights

INT4PACK, NF4 = "torch_int4pack", "bnb_nf4"
KERNELS = ("auto", INT4PACK, NF4)
DEFAULT_GROUP = 32


@dataclass
class Int4Weights(QuantizedWeights):
    """`kernel`: `auto`, or one of those above by name.

    `group`: inputs that share a scale and an offset; 0 is the kernel's own (32; NF4 has 64 and no other). `symmetric`:
    no offset, which is coarser and no smaller in this kernel's packing.
    """

    kernel: str = "auto"
    group: int = 0
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"weights.kernel={self.kernel}: expected one of {', '.join(KERNELS)}")
        if self.group not in (0, *GROUPS):
            raise ValueError(
                f"weights.group={self.group}: expected one of {', '.join(map(str, GROUPS))}, or 0 for the kernel's own"
            )
        if self.kernel == NF4 and self._asks_int4pack:
            raise ValueError(
                f"weights.kernel={NF4} has blocks of {nf4.BLOCK} and no offset: weights.group and "
                f"weights.symmetric are for weights.kernel={INT4PACK}"
            )

    def storage(self, site: LinearSite, setting: Setting) -> Storage:
        if self._choice(setting).name != Int4PackLinear.kernel:
            return nf4_storage(site, setting)
        keeps_rows = bool(site.embedding)
        group = self.group or DEFAULT_GROUP
        stored = Int4PackLinear.stored_bytes(*site.shape, group, keeps_rows=keeps_rows)
        padding = padding_note(site.shape, outputs_multiple(keeps_rows), group)
        note = notes(padding, narrowed_note(setting.dtype))
        return Storage(Int4PackLinear.kernel, stored, Int4PackLinear.row_invariant, note)

    def layer(self, linear: nn.Linear, site: LinearSite, setting: Setting) -> QuantizedLinear:
        if self._choice(setting).name != Int4PackLinear.kernel:
            return nf4_layer(linear, keeps_rows=bool(site.embedding))
        return self._int4pack(linear, keeps_rows=bool(site.embedding))

    def resolved(self, plan: WeightsPlan) -> Self:
        return replace(self, kernel=INT4PACK if plan.kernels[0] == Int4PackLinear.kernel else NF4)

    def choice(self, setting: Setting) -> str:
        return str(self._choice(setting))

    @property
    def _asks_int4pack(self) -> bool:
        return bool(self.group) or self.symmetric

    def _int4pack(self, linear: nn.Linear, *, keeps_rows: bool = False) -> Int4PackLinear:
        return Int4PackLinear(
            linear, self.group or DEFAULT_GROUP, symmetric=self.symmetric, keeps_rows=keeps_rows
        )

    def _choice(self, setting: Setting) -> Choice:
        if setting.device.type != "cpu":
            if self.kernel == INT4PACK or self._asks_int4pack:
                raise ValueError(
                    f"weights.kernel={INT4PACK}, its groups and offsets are for a CPU; on {setting.device.type} leave "
                    "weights.kernel=auto"
                )
            return Choice(nf4.Nf4Linear.kernel)
        if self.kernel == NF4:
            return Choice(nf4.Nf4Linear.kernel)
        candidates = [Candidate(Int4PackLinear.kernel, self._int4pack, self._oracle)]
        if self.kernel == "auto" and not self._asks_int4pack and nf4.is_native():
            candidates.append(Candidate(nf4.Nf4Linear.kernel, nf4.Nf4Linear, nf4.oracle))
        return choose(candidates, setting.typical_shape, setting.dtype)

    def _oracle(self, linear: nn.Linear) -> Tensor:
        group = self.group or DEFAULT_GROUP
        weight = padded_weight(linear, 1, group)
        quantized = quantize_centred(weight, BITS, group, symmetric=self.symmetric)
        return quantized.dequantized()[:, : linear.in_features]
