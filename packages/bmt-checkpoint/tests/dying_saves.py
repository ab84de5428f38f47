"""Programs that save twice, and die in the second save at the n-th thing that is done to the file
system, for every n until one gets through.
"""

from __future__ import annotations

from pathlib import Path

from bmt_testing.programs import run_program

PROGRAM = """
import os, sys
from pathlib import Path
import torch
import bmt_checkpoint

torch.set_num_threads(1)
folder = Path(sys.argv[1])
events = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")

def net(value):
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, value)
    return model

# By a child, because another process may not save while this one has a directory's lock.
def save(value, moment=0):
    left = moment
    def hook(event, arguments):
        nonlocal left
        if event in events and str(folder) in str(arguments[0]):
            left -= 1
            if left == 0:
                os._exit(9)
    child = os.fork()
    if child == 0:
        sys.addaudithook(hook)
        write(value)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

{functions}

folder.mkdir()
values = []
save(1.0)
for moment in range(1, 1000):
    code = save(2.0, moment)
    model = net(0.0)
    read(model)
    values.append(model.weight[0, 0].item())
    assert model.weight.eq(values[-1]).all(), values
    if code == 0:
        break
    assert code == 9
    if values[-1] == 2.0:
        save(1.0)
assert values[0] == 1.0 and values[-1] == 2.0, values
print(len(values), *sorted(entry.name for entry in folder.glob('[!.]*')))
"""
OF_MODEL = """
def write(value):
    bmt_checkpoint.save(net(value), folder)
def read(model):
    bmt_checkpoint.load(model, folder)
"""
OF_TRAINING = """
def write(value):
    step = 1 if value == 1.0 else int(sys.argv[2])
    bmt_checkpoint.save_checkpoint(folder, net(value), step=step, extra=value)
def read(model):
    found = bmt_checkpoint.load_checkpoint(folder, model)
    assert model.weight.eq(found["extra"]).all(), found
"""


def die_at_every_moment(functions: str, folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Return how many saves there were, and what is in ``folder`` at last."""
    status, printed = run_program(
        PROGRAM.replace("{functions}", functions),
        folder.with_name("output"),
        arguments=[str(folder), *arguments],
    )
    assert status == 0, printed
    count, *entries = printed.splitlines()[-1].split()
    return int(count), entries
