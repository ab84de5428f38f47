# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_params import DistributedParameter as DistributedParameter
from bmt_params import ParameterInitializer as ParameterInitializer
