"""Checkpoints of models, in files and directories that any number of ranks writes and reads, and of
the state of a training.
"""

from bmt_checkpoint.background import wait_for_saves
from bmt_checkpoint.dcp_format import DcpFormat
from bmt_checkpoint.format import CheckpointFormat, CheckpointReader
from bmt_checkpoint.loading import load
from bmt_checkpoint.run_directory_lock import lock_checkpoints
from bmt_checkpoint.safetensors_format import SafetensorsFormat
from bmt_checkpoint.saving import save
from bmt_checkpoint.torch_format import TorchFormat
from bmt_checkpoint.training import load_checkpoint, save_checkpoint
from bmt_checkpoint.training_folder import latest
from bmt_params.state.index import Index, TensorEntry
from bmt_params.state.state_tensors import StoredTensor, TensorName, TensorPart

__all__ = [
    "CheckpointFormat",
    "CheckpointReader",
    "DcpFormat",
    "Index",
    "SafetensorsFormat",
    "StoredTensor",
    "TensorEntry",
    "TensorName",
    "TensorPart",
    "TorchFormat",
    "latest",
    "load",
    "load_checkpoint",
    "lock_checkpoints",
    "save",
    "save_checkpoint",
    "wait_for_saves",
]
