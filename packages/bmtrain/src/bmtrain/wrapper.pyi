# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_zero import BMTrainModelWrapper as BMTrainModelWrapper
