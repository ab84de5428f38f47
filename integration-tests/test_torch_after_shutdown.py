"""After shutdown torch is as it was before init: no hook of ours is left in it, in none of
its lists.
"""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json

import torch
import torch._dynamo  # torch imports it with the first optimizer, and it adds DTensor to the lists
import torch.nn.modules.module as modules
import torch.optim.optimizer as optimizers
import torch.nn.utils.clip_grad as clip_grad
import torch.utils._foreach_utils as foreach
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.nn.parallel import DistributedDataParallel

import bmtrain as bmt


def replaceable():
    wrappers = DistributedDataParallel, FullyShardedDataParallel
    validators = _fully_shard._validate_module, replicate_with_fsdp._validate_module
    inside = clip_grad._clip_grads_with_norm_, *validators
    return *(wrapper.__init__ for wrapper in wrappers), *inside, *vars(torch.nn.init).values()


ORIGINALS = replaceable()


def hooks():
    found = {}
    for module in (modules, optimizers):
        for name, value in vars(module).items():
            if name.startswith("_global_") and hasattr(value, "__len__"):
                found[name] = len(value)
    types = optimizers._foreach_supported_types, foreach._foreach_supported_types
    found["foreach"] = [len(of_module) for of_module in types]
    found["replaced"] = replaceable() != ORIGINALS
    return found


seen = [hooks()]
for _ in range(2):
    bmt.init_distributed(device="cpu")
    layers = torch.nn.ModuleList([torch.nn.Linear(3, 3)])
    model = bmt.BMTrainModelWrapper(torch.nn.Sequential(layers, torch.nn.Linear(3, 3)))
    for kind in (bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer):
        optimizer = kind(model.parameters())
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(optimizer)
        manager.backward(model[1](model[0][0](torch.ones(2, 3))).sum())
        manager.step()
    seen.append(hooks())
    bmt.shutdown()
    seen.append(hooks())
print(json.dumps(seen))
"""


def test_nothing_of_ours_stays_in_torch() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    before, running, after, running_again, after_again = json.loads(ran.stdout.splitlines()[-1])
    assert before == after == after_again
    assert running == running_again != before
    assert running["replaced"] and not before["replaced"]
