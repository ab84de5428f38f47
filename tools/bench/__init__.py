"""Side-by-side training benchmarks: the same plain torch model under bmt and its peers, in one run
on one machine.
"""
