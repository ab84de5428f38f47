"""Watches the calls of all ranks of a run: says who hangs, where and why, and ends the run on all
ranks.
"""
