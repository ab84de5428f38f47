"""A float32 master kept exactly as its bfloat16 rounding, which is the parameter, and a
16-bit remainder.

[Note: compact master] Of the 32 bits of a master the parameter holds ``(bits + 0x8000) >> 16``,
which is the master rounded to nearest, halves away from zero. The remainder holds the difference,
from -0x8000 to 0x7FFF, so that ``bits`` is the parameter's 16 bits shifted up, plus the remainder.

Halves do not go to the even neighbour, as usual, because then 65537 float32 numbers would round to
an even bfloat16 (with the halves on both sides) and 65535 to an odd one, and 16 bits tell only
65536 apart. With truncation each bfloat16 would stand for 65536 numbers, but the model would
compute with truncated parameters. Of the two halves of an even number the one further from zero
therefore belongs to the odd neighbour. The master is exact in any case; the parameter differs from
``master.bfloat16()`` in the last bit where the low half is 0x8000 under an even upper half.

A write to the parameter (a loaded model, a pruning mask, swapped averages) changes its master too:
elements that keep their value keep their exact master, and any other master differs from the new
value by at most half of the value's last bit, so that it rounds to the value. Nothing has to notice
the write. Bits that would be NaN although the parameter is not (a zero was written before a
negative remainder) mean the parameter itself. NaN is stored as one quiet NaN with remainder 0. A
master beyond the largest bfloat16 shows as infinity and is kept exactly.

Every step below is one operation on tensors of one integer dtype, so that it means the same on
every device.
"""

from __future__ import annotations

import torch

DTYPE = torch.int16
"""The dtype of a remainder, which distinguishes it from a float32 master."""

QUIET_NAN = 0x7FC00000
_HALF = 1 << 15


@torch.no_grad()
def read_master(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the float32 master of which ``param`` (bfloat16) and ``remainder`` (int16) are
    the parts.

    >>> third = torch.tensor([1 / 3])
    >>> param, remainder = split_master(third)
    >>> param.item(), torch.equal(read_master(param, remainder), third)
    (0.333984375, True)
    """
    bits = (
        param.detach()
        .view(torch.int16)
        .to(torch.int32)
        .bitwise_left_shift_(16)
        .add_(remainder.to(torch.int32))
    )
    master = bits.view(torch.float32)
    return torch.where(master.isnan(), param.detach().to(torch.float32), master)


@torch.no_grad()
def write_master(master: torch.Tensor, param: torch.Tensor, remainder: torch.Tensor) -> None:
    """Set ``param`` (bfloat16) and ``remainder`` (int16) to the parts of ``master`` (float32)."""
    raised = master.view(torch.int32).masked_fill(master.isnan(), QUIET_NAN).add_(_HALF)
    param.detach().view(torch.int16).copy_(raised.bitwise_right_shift(16).to(torch.int16))
    # In the range of int16 before it is narrowed.
    remainder.copy_(raised.bitwise_and_(0xFFFF).sub_(_HALF).to(torch.int16))


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a parameter and a remainder that are the parts of ``master`` (float32)."""
    param = torch.empty_like(master, dtype=torch.bfloat16)
    remainder = torch.empty_like(master, dtype=DTYPE)
    write_master(master, param, remainder)
    return param, remainder
