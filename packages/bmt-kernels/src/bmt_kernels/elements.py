"""Numbers of element types and options in the compiled modules (``csrc/common/element.h``)."""

from __future__ import annotations

from enum import IntEnum

import torch

ELEMENTS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


class Form(IntEnum):
    """How the float32 weight of a parameter is stored."""

    PLAIN = 0
    """The weight is the parameter."""
    MASTER_FLOAT16 = 1
    MASTER_BFLOAT16 = 2
    """A float32 master, of which the half parameter is the rounded copy."""
    REMAINDER = 3
    """The weight is split into the bfloat16 parameter, which is its rounding, and an
    int16 remainder.
    """


class Decay(IntEnum):
    """The value that weight decay changes."""

    NONE = 0
    COUPLED = 1
    """The gradient."""
    DECOUPLED = 2
    """The weight."""


class Power(IntEnum):
    """The function of the elements that is summed for a norm."""

    SUM = 0
    SQUARES = 1
    LARGEST = 2
    OTHER = 3
