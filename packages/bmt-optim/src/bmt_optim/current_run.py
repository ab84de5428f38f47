"""What optimizers need of the run, with or without ``init_distributed()``."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from bmt_core.comm.protocols import Group
from bmt_core.comm.torch_backend import SingleGroup
from bmt_core.ops import REFERENCE, Kernels, choose_kernels
from bmt_core.ops.table import REFERENCE_NAME, VARIABLE
from bmt_core.run.runtime import current, is_initialized


def world() -> Group:
    """Return the group of all ranks: without a run, this process alone."""
    return current().world if is_initialized() else SingleGroup(0)


def kernels_on(device: torch.device) -> Kernels:
    """Return the run's kernels if they serve ``device``, otherwise (or without a run) the plain-torch reference."""
    return current().kernels.on(device) if is_initialized() else REFERENCE


def kernels_of_host() -> Kernels:
    """Return kernels for work on the host, whatever the run's device: compiled ones if there are any and ``BMT_KERNELS`` agrees."""
    host = torch.device("cpu")
    if not is_initialized():
        return REFERENCE
    run = current()
    if run.device.type == "cpu":
        return run.kernels.on(host)
    # The variable names kernels for the run's device; only plain torch is for both.
    providers = run.registry.kernel_providers
    name = os.environ.get(VARIABLE, "")
    is_for_both = name == REFERENCE_NAME
    return choose_kernels(providers, host, name if is_for_both else "")


def kernels_for(tensors: Iterable[torch.Tensor], device: torch.device) -> Kernels:
    """Return the kernels for ``tensors`` if all are on ``device``; the reference takes any mixture."""
    return kernels_on(device) if all(tensor.device == device for tensor in tensors) else REFERENCE
