"""Names of DeepSpeed and Determined: they work, or the error names the replacement."""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import zerolab.client
import zerolab.core
import zerolab.searcher
import zerotrial
from tests.trial.helpers import make_spec
from zerolab.core.context import CheckpointContext, Context, PreemptContext, TrainContext
from zerolab.core.socket_ranks import SocketRanks
from zerolab.errors import TrialError
from zerolab.ranks import RankLocation
from zerolab.replacements import replacements


def test_deepspeed_arguments_select_engine_config(tmp_path: Path) -> None:
    parser = zerotrial.add_config_arguments(argparse.ArgumentParser())
    assert parser.parse_args([]).deepspeed_config is None
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}')
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    assert args.deepspeed is True
    engine, *_ = zerotrial.initialize(args=args, model=torch.nn.Linear(2, 1))
    assert engine.get_lr() == [0.5]


WORLD = """
import sys
import torch.distributed as dist
import zerotrial
from zerotrial.engine.comm.process_group import destroy_process_groups
rank, size, method = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] or None
for _ in range(2):  # a second call changes nothing
    zerotrial.init_distributed(init_method=method, rank=rank, world_size=size)
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, dist.get_rank())
print(ranks, dist.get_backend())
destroy_process_groups()
"""


def start(rank: int, size: int, method: str = "", **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-c", WORLD, str(rank), str(size), method],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment},
    )


def without_connections(output: str) -> str:
    """Drop the lines of Gloo that torch 2.8 and 2.9 print for each connected group."""
    lines = output.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[Gloo]"))


@pytest.mark.processes
def test_init_distributed_with_one_or_two_ranks(tmp_path: Path) -> None:
    single = start(-1, -1)
    two = [start(rank, 2, f"file://{tmp_path}/meeting") for rank in range(2)]
    output, problem = single.communicate(timeout=240)
    assert without_connections(output) == "[0] gloo\n", problem
    for process in two:
        output, problem = process.communicate(timeout=240)
        assert without_connections(output) == "[0, 1] gloo\n", problem


@pytest.mark.processes
def test_missing_world_size_names_the_launcher() -> None:
    _, problem = start(-1, -1, SLURM_NTASKS="4").communicate(timeout=240)
    assert "WORLD_SIZE: must be set where several ranks run, got nothing and SLURM_NTASKS=4" in (
        problem
    )


def test_determined_names_of_distributed() -> None:
    implementations: Sequence[zerotrial.Distributed | SocketRanks] = (
        zerotrial.Distributed(),
        SocketRanks(),
    )
    for ranks in implementations:
        assert (ranks.get_rank(), ranks.get_size()) == (0, 1)
        assert (ranks.get_local_rank(), ranks.get_local_size()) == (0, 1)
        assert ranks.get_num_agents() == 1
    remote = zerotrial.Distributed()
    remote.rank, remote.size, remote.local_rank, remote.local_size = 5, 8, 1, 4
    assert (remote.get_rank(), remote.get_local_rank(), remote.get_num_agents()) == (5, 1, 2)


def test_determined_names_of_the_trial_context(tmp_path: Path) -> None:
    context = zerotrial.ZeroTrialContext(make_spec(tmp_path), zerotrial.Distributed())
    with pytest.raises(TrialError, match="no engine is wrapped yet"):
        context.num_micro_batches_per_slot  # noqa: B018
    engine, *_ = zerotrial.initialize(
        model=torch.nn.Linear(2, 1),
        config={
            "train_batch_size": 6,
            "gradient_accumulation_steps": 3,
            "optimizer": {"type": "SGD"},
        },
    )
    context.wrap_model_engine(engine)
    assert context.num_micro_batches_per_slot == 3
    assert context.train_micro_batch_size_per_gpu == 2
    with pytest.raises(AttributeError, match="no attribute 'wrap_mpu'; call set_mpu"):
        context.wrap_mpu(None)
    with pytest.raises(AttributeError, match="did you mean 'get_hparams'"):
        context.get_hparms()


def test_determined_names_raise_with_replacement() -> None:
    batch: zerotrial.TorchData = {"x": torch.ones(2)}
    assert isinstance(batch, dict)
    assert "TorchData" in dir(zerotrial)
    message = "zerotrial has no 'DeepSpeedTrial'; instead: `zerotrial.ZeroTrial`"
    with pytest.raises(ImportError, match=message):
        from zerotrial import DeepSpeedTrial  # noqa: F401
    with pytest.raises(ImportError, match="no 'zero'; use it from `import deepspeed`"):
        zerotrial.zero.Init()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="has no attribute 'DeepSpedTrial'"):
        zerotrial.DeepSpedTrial  # noqa: B018
    with pytest.raises(ImportError, match="no 'DistributedContext'; instead: leave it out"):
        zerolab.core.DistributedContext  # noqa: B018
    with pytest.raises(TypeError, match=r"no argument 'distributed': leave it out.* 'nonsense'$"):
        zerolab.core.init(distributed=None, nonsense=1)
    with pytest.raises(AttributeError, match=r"'gather'; use allgather\(value\)"):
        SocketRanks().gather(1)  # type: ignore[attr-defined]


def test_replacements_of_determined_names_exist() -> None:
    modules = {"zerotrial": zerotrial, "zerolab": zerolab}
    for replacement in replacements("determined.").values():
        for top, name in re.findall(r"`(zero\w+)\.([\w.]+)", replacement):
            target: object = modules[top]
            for part in name.split("."):
                target = getattr(target, part)
    classes = (Context, TrainContext, CheckpointContext, PreemptContext, RankLocation)
    for replacement_class in (*classes, zerotrial.ZeroTrialContext):
        table = replacements(f"{replacement_class.__name__}.")
        assert table
        assert not set(table) & set(dir(replacement_class))
