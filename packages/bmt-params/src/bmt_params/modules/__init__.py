"""Modules with distributed parameters, and the protocols between Blocks, layers and schedules."""
