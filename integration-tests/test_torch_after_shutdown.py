"""After shutdown torch is as it was before init: no hook of ours is left in it, in none of its lists."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json
import sys

import torch
import torch._dynamo  # torch imports it with the first optimizer, and it adds DTensor to the lists
import torch.nn.modules.module as modules
import torch.optim.optimizer as optimizers
import torch.nn.utils.clip_grad as clip_grad
import torch.utils._foreach_utils as foreach
from torch.nn.parallel import DistributedDataParallel

import bmtrain as bmt


def replaceable():
    return clip_grad._clip_grads_with_norm_, DistributedDataParallel.__init__, *vars(torch.nn.init).values()


ORIGINALS = replaceable()
FSDP = "torch.distributed.fsdp._fully_shard._fully_shard"  # imported while a run is on


def hooks():
    found = {}
    for module in (modules, optimizers):
        for name, value in vars(module).items():
            if name.startswith("_global_") and hasattr(value, "__len__"):
                found[name] = len(value)
    found["foreach"] = [len(optimizers._foreach_supported_types), len(foreach._foreach_supported_types)]
    found["replaced"] = replaceable() != ORIGINALS
    found["fsdp"] = FSDP in sys.modules and sys.modules[FSDP]._validate_module.__code__.co_name
    found["finders"] = len(sys.meta_path)
    return found


seen = [hooks()]
for _ in range(2):
    bmt.init_distributed(device="cpu")
    model = bmt.BMTrainModelWrapper(torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(3, 3)]), torch.nn.Linear(3, 3)))
    for optimizer in (bmt.optim.AdamOptimizer(model.parameters()), bmt.optim.AdamOffloadOptimizer(model.parameters())):
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(optimizer)
        manager.backward(model[1](model[0][0](torch.ones(2, 3))).sum())
        manager.step()
    import torch.distributed.fsdp

    seen.append(hooks())
    bmt.shutdown()
    seen.append(hooks())
print(json.dumps(seen))
"""


def test_nothing_of_ours_stays_in_torch() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    before, running, after, running_again, after_again = json.loads(ran.stdout.splitlines()[-1])
    assert before == after == after_again
    assert running == running_again != before
    assert running["replaced"] and not before["replaced"]
