# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_core import DistributedParameter as DistributedParameter
from bmt_core import ParameterInitializer as ParameterInitializer
