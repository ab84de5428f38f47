"""Modules with distributed parameters, and the value through which schedules drive Blocks."""
