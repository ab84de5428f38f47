"""Element types, under the numbers that the compiled modules know them by (``csrc/common/element.h``)."""

from __future__ import annotations

from enum import IntEnum

import torch

ELEMENTS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


class Form(IntEnum):
    """How the float32 weight of a parameter is stored."""

    PLAIN = 0
    """It is the parameter."""
    MASTER_FLOAT16 = 1
    MASTER_BFLOAT16 = 2
    """A float32 master, of which the half parameter is the rounded copy."""
    REMAINDER = 3
    """Its upper half is the bfloat16 parameter, rounded, and its lower half an int16 beside it."""


class Decay(IntEnum):
    """What weight decay changes."""

    NONE = 0
    COUPLED = 1
    """The gradient."""
    DECOUPLED = 2
    """The weight."""


class Power(IntEnum):
    """What is summed over elements for a norm."""

    SUM = 0
    SQUARES = 1
    LARGEST = 2
    OTHER = 3
