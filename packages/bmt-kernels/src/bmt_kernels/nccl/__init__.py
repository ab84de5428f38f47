"""The communication backend ``nccl-native``: NCCL without torch's process groups.

``init_distributed(comm_backend="nccl-native")`` or ``BMT_COMM_BACKEND=nccl-native`` chooses it.
Operations run on the caller's current stream; tensors on the CPU go through gloo.

[Note: how the backend works] Checks are in Python, addresses go to a compiled module
(``csrc/nccl/``), which calls NCCL.

- The module has no device code, so it needs no nvcc. NCCL and the CUDA driver are opened when the
  backend is chosen (the driver, not the runtime: its library has one name for all versions of
  CUDA); the functions used are declared in ``csrc/nccl/abi.h``. So tests run the same module on the
  CPU with fakes of both libraries (``tests/fakes/``), which hang and fail on request.
- Nobody hangs. A collective that a rank does not join never ends on the others, and a host that
  waits for the device waits for it too. Every 50 ms a thread without Python queries the event after
  the oldest operation of each communicator, and asks NCCL for errors. The timeout counts from the
  time when an operation is the next to finish, because the host may be far ahead. At the first
  failure all communicators are aborted.
- After an abort the program would go on with garbage, so the exception must be raised first: it is
  given to the interpreter as a pending call, which raises in the main thread as soon as that is
  back in Python. A second thread tells the other ranks through the store, and they end their
  communication with the first rank's message.
- Joining a group, and connecting to its members at first use, block and have the same deadline.
  (Communicators that do not block would need no thread for that, but NCCL then starts one for every
  call: 150 us instead of 25.)
- A rank without NCCL is detected before anything waits for it.
"""

from bmt_kernels.nccl.backend import NcclBackend
from bmt_kernels.nccl.errors import NcclError
from bmt_kernels.nccl.group import NcclGroup

__all__ = ["NcclBackend", "NcclError", "NcclGroup"]
