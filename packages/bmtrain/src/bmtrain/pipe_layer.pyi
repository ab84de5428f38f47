# Written by tools/facade_stubs.py from bmtrain/_table.py.
