"""The operations in plain torch: the specification of every kernel, the fallback, and what tests
compare kernels with.

No function here reads a value on the host. A clip coefficient or an overflow flag is a tensor with
one element.
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
