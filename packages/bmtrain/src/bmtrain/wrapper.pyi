# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_zero import BMTrainModelWrapper as BMTrainModelWrapper
from bmt_zero import BMTrainModelWrapper as make_distributed
from bmt_zero import BMTrainModelWrapper as model_wrapper_dispatch
