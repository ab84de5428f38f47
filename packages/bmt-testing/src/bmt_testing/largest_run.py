"""How many ranks the largest run of a pool had, since the pytest plugin last asked. Without torch,
which a pytest that runs nothing on ranks need not import.
"""

_largest = 0


def note_run(world_size: int) -> None:
    """Note that a pool runs a function on ``world_size`` ranks."""
    global _largest
    _largest = max(_largest, world_size)


def take_largest_run() -> int:
    """Return the largest number of ranks since the last call, 0 if nothing has run."""
    global _largest
    largest, _largest = _largest, 0
    return largest
