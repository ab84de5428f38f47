"""Checkpoints of models, in files and directories that any number of ranks writes and reads, and of the state of a training."""

from bmt_core.checkpoint.background import wait_for_saves
from bmt_core.checkpoint.dcp_format import DcpFormat
from bmt_core.checkpoint.format import CheckpointFormat, CheckpointReader, Index, TensorEntry
from bmt_core.checkpoint.loading import load
from bmt_core.checkpoint.safetensors_format import SafetensorsFormat
from bmt_core.checkpoint.saving import save
from bmt_core.checkpoint.state_tensors import StoredTensor, TensorName, TensorPart
from bmt_core.checkpoint.torch_format import TorchFormat
from bmt_core.checkpoint.training import load_checkpoint, save_checkpoint
from bmt_core.checkpoint.training_folder import latest

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
    "save",
    "save_checkpoint",
    "wait_for_saves",
]
