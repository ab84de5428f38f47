"""Tests once whether Adam for float32 parameters equals torch's in every bit on this processor.

That depends on the formula, on the products and sums that torch's kernels round together
(instruction sets differ), and on the square root (see [Note: torch's square root] in
``csrc/cpu/square_root.h``). If it does not, float32 parameters are left to the reference, because
``AdamOptimizer`` promises the results of ``torch.optim.Adam``.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bmt_core.ops import reference
from bmt_kernels.elements import ELEMENTS, Decay, Form

_SIZE = 2500  # several vectors, and a rest
_LR, _BETAS, _EPS, _DECAY, _STEP = 0.01, (0.9, 0.999), 1e-8, 0.1, 3


def choose_square_root(binary: ModuleType) -> bool:
    """Make ``binary`` use a square root with which its Adam equals torch's. Return whether there
    is one.
    """
    for address in (0, _mkl_square_root()):
        binary.use_mkl_square_root(address)
        if all(_equals_torch(binary, decay) for decay in Decay):
            return True
    binary.use_mkl_square_root(0)
    return False


@cache
def _mkl_square_root() -> int:
    """The address of MKL's ``vmsSqrt`` in torch's library, 0 if it is not there."""
    library = Path(torch.version.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function: Any = ctypes.CDLL(str(library)).vmsSqrt
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _equals_torch(binary: ModuleType, decay: Decay) -> bool:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(_SIZE, generator=generator, device="cpu") for _ in range(3)] + [
        torch.rand(_SIZE, generator=generator, device="cpu")
    ]
    expected, found = [t.clone() for t in given], [t.clone() for t in given]
    params, grads, means, squares = ([tensor] for tensor in expected)
    weight_decay = 0.0 if decay == Decay.NONE else _DECAY
    reference.adam_step(
        params,
        grads,
        means,
        squares,
        [None],
        step=_STEP,
        lr=_LR,
        beta1=_BETAS[0],
        beta2=_BETAS[1],
        eps=_EPS,
        weight_decay=weight_decay,
        decoupled=decay == Decay.DECOUPLED,
    )
    settings = binary.AdamSettings(
        mean_weight=1 - _BETAS[0],
        beta2=_BETAS[1],
        square_weight=1 - _BETAS[1],
        root_correction=(1 - _BETAS[1] ** _STEP) ** 0.5,
        eps=_EPS,
        step_size=-(_LR / (1 - _BETAS[0] ** _STEP)),
        decay=1 - _LR * weight_decay if decay == Decay.DECOUPLED else weight_decay,
        decay_kind=decay,
        hold=False,
        scale=1.0,
        scale_at=0,
        clip_at=0,
        skip_at=0,
        skip_is_float=False,
    )
    addresses = [[tensor.data_ptr()] for tensor in found]
    binary.adam_step(Form.PLAIN, ELEMENTS[torch.float32], *addresses, [0], [_SIZE], settings, (1,))
    return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
