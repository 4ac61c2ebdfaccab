"""Process groups started by an engine are destroyed before the interpreter exits."""

import os
import subprocess
import sys

import pytest

from tests.waiting import free_port

SCRIPT = """
import atexit, threading
import torch, torch.distributed as dist
atexit.register(lambda: print("left", not dist.is_initialized(), flush=True))  # runs last
{start}
total = torch.ones(4)
dist.all_reduce(total)
print("sum", total[0].item(), flush=True)
"""

STARTS = {
    "initialize": """
import zerotrial
engine = zerotrial.initialize(
    model=torch.nn.Linear(2, 2),
    config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}},
)[0]
""",
    "init_distributed": """
import zerotrial
zerotrial.init_distributed()
""",
}


@pytest.mark.processes
@pytest.mark.parametrize("start", STARTS)
def test_process_group_is_destroyed_at_exit(start: str) -> None:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(start=STARTS[start])],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        printed, complaints = rank.communicate()
        assert rank.returncode == 0, complaints
        lines = [line for line in printed.splitlines() if not line.startswith("[Gloo]")]
        assert lines == ["sum 2.0", "left True"]  # torch 2.8 and 2.9 print connections of Gloo
