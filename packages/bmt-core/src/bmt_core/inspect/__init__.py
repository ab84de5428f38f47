"""Statistics of parameters, and of tensors that a model records while it runs, as if one process had all of them."""

from bmt_core.inspect.format import format_summary, summary_table
from bmt_core.inspect.model import inspect_model
from bmt_core.inspect.recording import BatchParts, record_tensor
from bmt_core.inspect.tensor import TensorInspector, inspect_tensor

__all__ = [
    "BatchParts",
    "TensorInspector",
    "format_summary",
    "inspect_model",
    "inspect_tensor",
    "record_tensor",
    "summary_table",
]
