"""Statistics of parameters, and of tensors that a model records while it runs, as if one process
had all of them.
"""

from bmtrain._inspect.format import format_summary, summary_table
from bmtrain._inspect.model import inspect_model
from bmtrain._inspect.recording import record_tensor
from bmtrain._inspect.tensor import TensorInspector, inspect_tensor

__all__ = [
    "TensorInspector",
    "format_summary",
    "inspect_model",
    "inspect_tensor",
    "record_tensor",
    "summary_table",
]
