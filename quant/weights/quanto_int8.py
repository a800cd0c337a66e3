"""8-bit weights by optimum-quanto (`qint8`), weight-only, a scale per output.

All that is stored is read by a pass; rows of a tied embedding are looked up in the head's codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quant.kernels.base import QuantizedLinear
from quant.kernels.quanto import QuantoLinear, quanto_storage
from quant.plan import LinearSite, Setting, Storage
from quant.weights.base import QuantizedWeights

BITS = 8


@dataclass
class QuantoInt8Weights(QuantizedWeights):
    """Has the options of every quantized format: `head`, `keep`."""

    def storage(self, site: LinearSite, setting: Setting) -> Storage:
        return quanto_storage(site, setting, BITS)

    def layer(self, linear: nn.Linear, site: LinearSite, setting: Setting) -> QuantizedLinear:
        return QuantoLinear(linear, BITS, keeps_rows=bool(site.embedding))
