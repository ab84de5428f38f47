"""A float32 master kept exactly as its bfloat16 rounding, which is the parameter, and a 16-bit remainder.

[Note: compact master] Of the 32 bits of a master the parameter holds ``(bits + 0x8000) >> 16``, which is the master rounded to
nearest, halves away from zero, and the remainder holds the low 16 bits, as int16. So ``bits`` is the parameter's 16 bits
shifted up, plus the remainder: the remainder says where the master lies between the two neighbours of the parameter.

The parameter is the truth, and the master follows it. Whoever writes a parameter (a loaded model, a pruning mask, swapped
averages) moves its master along: elements that keep their value keep their exact master, and any other master is off the new
value by at most half of the value's last bit, which rounding would give back. Nothing has to notice the write. Bits that
would be NaN although the parameter is not (a zero was written before a negative remainder) mean the parameter itself.
NaN is stored as one quiet NaN with remainder 0. A master beyond the largest bfloat16 shows as infinity and is kept exactly.
"""

from __future__ import annotations

import math

import torch

DTYPE = torch.int16
"""The dtype by which a remainder is told from a float32 master."""


def read_master(param: torch.Tensor, remainder: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the float32 master of which ``param`` (bfloat16) and ``remainder`` (int16) are the parts, in ``out`` if given.

    >>> third = torch.tensor([1 / 3])
    >>> param, remainder = split_master(third)
    >>> param.item(), torch.equal(read_master(param, remainder), third)
    (0.333984375, True)
    """
    if out is None:
        out = torch.empty_like(param, dtype=torch.float32, requires_grad=False)
    # One pass that widens, shifts and adds; a factor with dimensions, because one without would not widen int16.
    shift = torch.full((1,) * param.dim(), 1 << 16, dtype=torch.int32, device=param.device)
    torch.addcmul(remainder, param.detach().view(torch.int16), shift, out=out.view(torch.int32))
    return torch.where(out.isnan(), param.detach(), out, out=out)


def write_master(
    master: torch.Tensor, param: torch.Tensor, remainder: torch.Tensor, spare: torch.Tensor | None = None
) -> None:
    """Set ``param`` and ``remainder`` to the parts of ``master``, in which every NaN becomes the same one.

    ``spare`` (int32, of the same shape) is memory to compute in.
    """
    master.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    bits = master.view(torch.int32)
    raised = torch.add(bits, 1 << 15, out=spare) if spare is not None else bits + (1 << 15)
    torch.bitwise_right_shift(raised, 16, out=param.detach().view(torch.int16))
    remainder.copy_(bits)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a parameter and a remainder that are the parts of ``master`` (float32)."""
    param = torch.empty_like(master, dtype=torch.bfloat16)
    remainder = torch.empty_like(master, dtype=DTYPE)
    write_master(master.clone(), param, remainder)
    return param, remainder


def remainder_for(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Return the remainder with which ``param`` means ``master``, of which it is the rounding to nearest in either way.

    Where ``master`` lies halfway and ``param`` is the neighbour closer to zero, which cannot be said, it is the next float32.
    """
    upper, remainder = split_master(master)
    is_below = (upper.view(torch.int16) - 1 == param.detach().view(torch.int16)) & (remainder == -(1 << 15))
    return remainder.masked_fill_(is_below, (1 << 15) - 1)
