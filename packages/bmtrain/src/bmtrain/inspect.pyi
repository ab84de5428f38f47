# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_core.inspect import format_summary as format_summary
from bmt_core.inspect import inspect_model as inspect_model
from bmt_core.inspect import inspect_tensor as inspect_tensor
from bmt_core.inspect import record_tensor as record_tensor
from bmt_core.inspect import summary_table as summary_table
