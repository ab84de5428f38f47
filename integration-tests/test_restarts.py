"""torchrun on two nodes starts all ranks again after one has failed, though only one node has
counted a failure.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
from pathlib import Path
import bmtrain as bmt

folder = Path(sys.argv[1])
bmt.init_distributed(device="cpu", timeout=60)
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"rank {bmt.rank()} of {bmt.world_size()}, count {count}", flush=True)
bmt.synchronize()
if bmt.rank() == 3 and not (folder / "has-failed").exists():
    (folder / "has-failed").touch()
    os._exit(1)
bmt.synchronize()
bmt.shutdown()
"""


@pytest.mark.slow("bmt-core")
def test_all_ranks_start_again_after_one_of_another_node_has_failed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    port = 20000 + os.getpid() % 12000  # no other process gets it, as it could one that is free
    options = "--nnodes 2 --nproc-per-node 2 --max-restarts 2 --rdzv-id test --rdzv-backend c10d"
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", *options.split()),
                *("--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", f"is_host={int(is_host)}"),
                *(str(script), str(tmp_path)),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for is_host in (True, False)
    ]
    outputs = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    printed = re.findall(r"rank (\d) of 4, count (\d)", "".join(outputs))
    assert sorted(rank for rank, _ in printed) == sorted("0123" * 2)
    assert "1" in {count for _, count in printed}
