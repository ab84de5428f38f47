# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmtrain._inspect import format_summary as format_summary
from bmtrain._inspect import inspect_model as inspect_model
from bmtrain._inspect import inspect_tensor as inspect_tensor
from bmtrain._inspect import record_tensor as record_tensor
from bmtrain._inspect import summary_table as summary_table
