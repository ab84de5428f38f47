# Built from csrc/cpu/module.cpp. The functions on tensors are described in launcher.py.

from bmt_kernels.launcher import Addresses, Where

POWERS_SUM_WORKSPACE: int
WITHOUT_CUDA: str | None  # why the module for CUDA was left out of the build that made this one

class AdamSettings:
    def __init__(
        self,
        *,
        mean_weight: float,
        beta2: float,
        square_weight: float,
        root_correction: float,
        eps: float,
        step_size: float,
        decay: float,
        decay_kind: int,
        hold: bool,
        scale: float,
        scale_at: int,
        clip_at: int,
        skip_at: int,
        skip_is_float: bool,
    ) -> None: ...

def adam_step(
    form: int,
    grad: int,
    params: Addresses,
    grads: Addresses,
    exp_avgs: Addresses,
    exp_avg_sqs: Addresses,
    masters: Addresses,
    numels: list[int],
    settings: AdamSettings,
    where: Where,
    /,
) -> None: ...
def cast(
    sources: Addresses,
    from_elements: list[int],
    targets: Addresses,
    to_elements: list[int],
    numels: list[int],
    where: Where,
    /,
) -> None: ...
def has_non_finite(
    tensors: Addresses, numels: list[int], elements: list[int], flag: int, where: Where, /
) -> None: ...
def powers_sum(
    tensors: Addresses,
    numels: list[int],
    elements: list[int],
    weights: list[float],
    kind: int,
    p: float,
    result: int,
    workspace: int,
    where: Where,
    /,
) -> None: ...
def scale_(
    tensors: Addresses, numels: list[int], elements: list[int], factor: int, where: Where, /
) -> None: ...
def zero_if_(
    tensors: Addresses,
    numels: list[int],
    elements: list[int],
    flag: int,
    flag_is_float: bool,
    where: Where,
    /,
) -> None: ...
def cross_entropy_forward(
    logits: int,
    element: int,
    rows_classes_stride: list[int],
    target: int,
    first_class: int,
    weight: int,
    results: Addresses,
    where: Where,
    /,
) -> None: ...
def cross_entropy_backward(
    logits: int,
    element: int,
    rows_classes_stride: list[int],
    target: int,
    first_class: int,
    weight: int,
    factors: Addresses,
    gradient: int,
    gradient_stride: int,
    where: Where,
    /,
) -> None: ...
def instruction_set() -> str:
    """Name of the instruction set in use: portable, avx2 or avx512."""

def instruction_sets() -> list[str]:
    """Names of those that this processor has, best last."""

def use_instruction_set(name: str) -> None:
    """Use another one of them. Raises ValueError for a name that is not usable."""

def use_mkl_square_root(vms_sqrt: int) -> None:
    """Take the square root of Adam for float32 parameters from MKL's vmsSqrt at this address; 0:
    the processor's own.
    """
