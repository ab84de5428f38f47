"""The operations in plain torch: what every kernel must compute, the fallback, and the oracle of tests.

No function here reads a value on the host: what decides (a clip coefficient, an overflow flag) stays on the device, as a
tensor with one element.
"""

from bmt_core.ops.reference.adam import adam_step
from bmt_core.ops.reference.cross_entropy import cross_entropy_backward, cross_entropy_forward
from bmt_core.ops.reference.gradients import has_non_finite, powers_sum, scale_, zero_if_

__all__ = [
    "adam_step",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "has_non_finite",
    "powers_sum",
    "scale_",
    "zero_if_",
]
