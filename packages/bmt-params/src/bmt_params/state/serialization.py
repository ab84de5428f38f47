"""Values as bytes that ranks send each other: tensors and plain values, and nothing that runs code
when it is read.
"""

from __future__ import annotations

import io
from typing import Any

import torch


def to_bytes(value: object) -> bytes:
    """Serialise tensors, of every dtype, and plain values."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the value that :func:`to_bytes` serialised to ``data``."""
    return torch.load(io.BytesIO(data), weights_only=True)
