# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_cp import Part as Part
from bmt_cp import attention as attention
from bmt_cp import gather as gather
from bmt_cp import split as split
