"""Modules that a run at stages 0 to 2 does not import: each takes most of a second.

torch's own optimizers import ``torch._dynamo`` when they are built, and with it much of
torch.distributed; that costs 1 to 2 seconds in any torch program. An agent's fork server has
imported it before a trial starts. The tests check that our modules import no more.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import DEADLINE_S

RUN = """
import builtins, json, sys, tempfile

imported, asked = builtins.__import__, set()

def note(name, globals=None, locals=None, fromlist=(), level=0):
    who = (globals or {}).get("__name__", "")
    if who.startswith(("zerotrial", "zerolab")):
        asked.update([(who, name), *((who, f"{name}.{part}") for part in fromlist or ())])
    return imported(name, globals, locals, fromlist, level)

builtins.__import__ = note
import torch
from tests.waiting import DEADLINE_S
import zerotrial

for stage in range(3):
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 4), config=config)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    with tempfile.TemporaryDirectory() as directory:
        engine.save_checkpoint(directory)
        engine.load_checkpoint(directory)
    engine.close()
print(json.dumps([sorted(asked), sorted(sys.modules)]))
"""

SLOW = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
)
OF_OTHER_STAGES = ("stage3", "pipeline", "checkpoint.deepspeed")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], list[str]]:
    """Imports by importing module, and all loaded modules, with an empty PATH."""
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PATH": str(tmp_path_factory.mktemp("no-programs"))},
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    imports, modules = json.loads(done.stdout.splitlines()[-1])
    return imports, modules


@pytest.mark.processes
def test_training_below_stage_3_imports_nothing_slow(
    done: tuple[list[list[str]], list[str]],
) -> None:
    imports, modules = done
    assert ["zerotrial.engine.flat.stages", "torch"] in imports  # imports are seen at all
    assert [pair for pair in imports if pair[1].startswith(SLOW)] == []
    of_other_stages = tuple(f"zerotrial.engine.{name}" for name in OF_OTHER_STAGES)
    unwanted = (*of_other_stages, "torch.distributed.checkpoint", "torch.distributed.pipelining")
    assert [name for name in modules if name.startswith(unwanted)] == []


@pytest.mark.processes
def test_training_needs_no_compiler(done: tuple[list[list[str]], list[str]]) -> None:
    """DeepSpeed builds its kernels when it is first used."""
    imports, _ = done
    assert [pair for pair in imports if pair[1].startswith("torch.utils.cpp_extension")] == []
