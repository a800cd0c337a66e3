"""4-bit NormalFloat weights by bitsandbytes (Dettmers et al. 2023, arXiv 2305.14314), weight-only.

Blocks of 64 weights share an absmax. Stored: half a byte a weight and the absmax, all of it read by a pass; rows of a
tied embedding are unpacked from the head's codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quant.kernels.base import QuantizedLinear
from quant.kernels.bnb_nf4 import nf4_layer, nf4_storage
from quant.plan import LinearSite, Setting, Storage
from quant.weights.base import QuantizedWeights


@dataclass
class BnbNf4Weights(QuantizedWeights):
    """Has the options of every quantized format: `head`, `keep`."""

    def storage(self, site: LinearSite, setting: Setting) -> Storage:
        return nf4_storage(site, setting)

    def layer(self, linear: nn.Linear, site: LinearSite, setting: Setting) -> QuantizedLinear:
        return nf4_layer(linear, keeps_rows=bool(site.embedding))
