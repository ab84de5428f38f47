# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_core import load as load
from bmt_core import save as save
from bmt_core.store import _save_to_rank0 as _save_to_rank0
from bmt_core.store import allgather_objects as allgather_objects
from bmt_core.store import broadcast_object as broadcast_object
