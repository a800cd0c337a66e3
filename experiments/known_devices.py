"""What the makers of some devices say these can do: peaks, for theory beside measurements, never in place of them.

Arithmetic is 16-bit matrix products with float32 sums, without sparsity. A device that is not listed has no entry
rather than a guessed one, nor has a rate that its maker does not publish.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.roofline import Ceilings


@dataclass(frozen=True)
class KnownDevice:
    """Peak rates in 1e9 bytes and 1e12 operations a second, memory in its maker's GB; None: not published."""

    name: str
    read_gb_s: float
    gemm_tflop_s: float | None
    memory_gb: float
    source: str

    @property
    def ceilings(self) -> Ceilings:
        """Raises ValueError where no arithmetic rate is published."""
        if self.gemm_tflop_s is None:
            raise ValueError(
                f"device={self.name}: its arithmetic rate is not published; expected measured ceilings"
            )
        return Ceilings(self.read_gb_s, 1e3 * self.gemm_tflop_s)


H100_SXM = KnownDevice(
    "H100 SXM", 3350, 989, 80, "NVIDIA H100 datasheet, half of the rate given with sparsity"
)
H200_SXM = KnownDevice(
    "H200 SXM", 4800, 989, 141, "NVIDIA H200 datasheet, half of the rate given with sparsity"
)
A100_SXM_80GB = KnownDevice("A100 SXM 80 GB", 2039, 312, 80, "NVIDIA A100 datasheet")
A100_SXM_40GB = KnownDevice("A100 SXM 40 GB", 1555, 312, 40, "NVIDIA A100 datasheet")
L4 = KnownDevice("L4", 300, 121, 24, "NVIDIA L4 datasheet, half of the rate given with sparsity")
# Apple states bandwidths, but no rate of 16-bit products; memory is the largest configuration's.
M4_PRO = KnownDevice("Apple M4 Pro", 273, None, 64, "Apple newsroom, October 2024")
M4_MAX = KnownDevice("Apple M4 Max, 40-core GPU", 546, None, 128, "Apple newsroom, October 2024")

KNOWN_DEVICES: Mapping[str, KnownDevice] = {
    device.name: device for device in (H100_SXM, H200_SXM, A100_SXM_80GB, A100_SXM_40GB, L4, M4_PRO, M4_MAX)
}
