# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_core import print_block as print_block
from bmt_core import print_dict as print_dict
from bmt_core import print_rank as print_rank
from bmt_core import see_memory as see_memory
from bmt_core.utils import AverageRecorder as AverageRecorder
from bmt_core.utils import check_torch_version as check_torch_version
from bmt_core.utils import round_up as round_up
from bmt_core.utils import tp_split_tensor as tp_split_tensor
