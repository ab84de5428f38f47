# Built from csrc/cuda/module.cpp. The functions on tensors are described in launcher.py.

from bmt_kernels.launcher import Addresses, Where

ARCHITECTURES: list[int]  # 900 is sm_90
POWERS_SUM_WORKSPACE: int

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

class PeerLink:
    """See ``bmt_core.ops.PeerLink``. Addresses are those of memory, streams and flags of
    four bytes.
    """

    def __init__(self) -> None: ...
    def shared(self, address: int, /) -> tuple[bytes, int]: ...
    def opened(self, handle: bytes, /) -> int: ...
    def close(self, address: int, /) -> None: ...
    def mapped(self, address: int, bytes: int, /) -> int: ...
    def unmap(self, address: int, /) -> None: ...
    def copy(
        self,
        source: int,
        bytes: int,
        target: int,
        free: int,
        free_value: int,
        full: int,
        full_value: int,
        after: int,
        stream: int,
        /,
    ) -> None: ...
    def wait(self, flag: int, value: int, stream: int, /) -> None: ...
    def write(self, flag: int, value: int, after: int, stream: int, /) -> None: ...
