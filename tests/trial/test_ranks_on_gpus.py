"""GPUs of ranks: selection, rendezvous, random state and broadcasts; see docs/contribute/gpu.md."""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.ranks import run_on_ranks
from zerolab.agent.run import run_environment
from zerolab.contract.spec import ProfilingSpec
from zerolab.extensions.launcher_ssh import worker
from zerolab.launcher.devices import find_slots
from zerotrial.engine.builder.environment import choose_device
from zerotrial.extensions.deepspeed_api import cpu_support
from zerotrial.extensions.deepspeed_api.shared_weights import HostMemory
from zerotrial.extensions.pipeline.module import PipelineModule
from zerotrial.extensions.pipeline.runner import Runner
from zerotrial.extensions.profiler.flops import ForwardProfile
from zerotrial.extensions.tensor_parallel import model_sharding
from zerotrial.loop.profiling import LoopTimings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

GPU = torch.device("cuda")
COUNT = "import torch; print(torch.cuda.device_count())"
CHECK_NEW_PROCESS = """
        import pathlib
        begun = pathlib.Path("/proc/self/cmdline").read_text().split("\\0")
        assert "zerotrial.process.launch" in begun, begun
        assert context.device == torch.device("cuda", context.distributed.local_rank)
        assert torch.cuda.current_device() == context.device.index
"""
NCCL_SCRIPT = """
import os
os.environ.pop("NCCL_SOCKET_IFNAME", None)
import torch, torch.distributed as dist
from zerolab.contract.spec import Nodes
from zerotrial.process.rendezvous import choose_network_interface
choose_network_interface(Nodes((1, 1), 0, "127.0.0.1", 0))
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1, device="cuda"))
torch.cuda.synchronize()
dist.destroy_process_group()
"""
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"


def test_engine_device_follows_local_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = torch.cuda.device_count()
    for local in range(count + 1):  # the last one as if only its own GPU were visible
        monkeypatch.setenv("LOCAL_RANK", str(local))
        assert choose_device(None) == torch.device("cuda", local % count)


def test_cpu_patches_do_not_apply_with_gpu() -> None:
    cpu_arguments: list[bool] = []

    class State:
        def _prepare_backend(self, cpu: bool = False) -> None:
            cpu_arguments.append(cpu)

    cpu_support._patch_accelerate(SimpleNamespace(PartialState=State))  # type: ignore[arg-type]
    State()._prepare_backend(cpu=False)
    assert cpu_arguments == [False]
    module = SimpleNamespace(__name__="lightning.pytorch.strategies.deepspeed", CUDAAccelerator=int)
    cpu_support._patch_lightning(module)  # type: ignore[arg-type]
    assert module.CUDAAccelerator is int


def run_python(arguments: list[str], **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.processes
def test_run_and_rank_see_only_their_gpus(tmp_path: Path) -> None:
    slots = find_slots(None, cpu=False)
    slot_ids = [slot.id for slot in slots]
    run_variables = run_environment(slots, slot_ids[:1])
    assert run_python(["-c", COUNT], **run_variables) == "1"
    node_variables = worker._environment(
        SimpleNamespace(archive=b"", slots=slot_ids[:1], environment={})  # type: ignore[arg-type]
    )
    assert run_python(["-c", COUNT], **node_variables) == "1"
    rank = {"RANK": "0", "LOCAL_RANK": "0"}
    rank_command = [
        "-m",
        "zerolab.launcher.rank",
        str(os.getpid()),
        str(tmp_path),
        "--slots=1",
        "--",
    ]
    all_variables = run_environment(slots, slot_ids)
    assert run_python([*rank_command, sys.executable, "-c", COUNT], **all_variables, **rank) == "1"


@pytest.mark.processes
def test_nccl_uses_interface_of_first_host() -> None:
    output = run_python(
        ["-c", NCCL_SCRIPT], NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,BOOTSTRAP,ENV"
    )
    assert re.search(r"Bootstrap ?: Using lo:127\.0\.0\.1", output), output


@pytest.mark.processes
def test_gpu_ranks_are_new_processes(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "digits")
    file = tmp_path / "digits" / "experiment.yaml"
    slots = min(2, torch.cuda.device_count())
    file.write_text(file.read_text().replace("slots_per_trial: 2", f"slots_per_trial: {slots}"))
    model = tmp_path / "digits" / "model_def.py"
    init_line = "        self.context = context\n"
    assert init_line in model.read_text()
    model.write_text(model.read_text().replace(init_line, init_line + CHECK_NEW_PROCESS))
    environment = {"ZEROLAB_HOME": str(tmp_path / "home")}
    try:
        output = run_python(["-m", "zerolab", "run", "--test", str(file)], **environment)
    finally:
        run_python(["-m", "zerolab", "down"], **environment)
    assert "COMPLETED" in output


def test_profiled_seconds_include_gpu_time() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)).to(GPU)
    matrix = torch.randn(4096, 4096, device=GPU)
    model(matrix)
    numels = {name: value.numel() for name, value in model.named_parameters()}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with ForwardProfile(model, numels) as profile:
        start.record()
        model(matrix)
        end.record()
    torch.cuda.synchronize()
    (root, *_) = profile.costs()
    # Within events on the GPU's own clock; without waiting it would be the time of the launches.
    assert root.seconds * 1000 > start.elapsed_time(end) / 2
    timings = LoopTimings(ProfilingSpec(enabled=True), GPU)
    timings.begin(0)
    start.record()
    for _ in range(20):
        model(matrix)
    end.record()
    timings.end()
    torch.cuda.synchronize()
    batch_seconds = timings.pop_means()["profile_batch_seconds"]
    assert batch_seconds * 1000 > start.elapsed_time(end) / 2


def test_pipeline_build_keeps_gpu_random_state() -> None:
    runner = object.__new__(Runner)
    runner._chunks, runner._device = {}, GPU
    saved = torch.cuda.get_rng_state_all()
    with runner._state_restored([]):
        torch.randn(8, device=GPU)
    PipelineModule([nn.Linear(2, 2)], num_stages=1)
    assert all(map(torch.equal, torch.cuda.get_rng_state_all(), saved))


def drawn() -> list[float]:
    torch.cuda.manual_seed(dist.get_rank())
    model_sharding._synchronize_random_state(SimpleNamespace(group=dist.group.WORLD), GPU)  # type: ignore[arg-type]
    return torch.randn(4, device=GPU).tolist()


@pytest.mark.processes
def test_tensor_ranks_share_random_state() -> None:
    first, second = run_on_ranks(drawn, 2, gpus=True)
    assert first == second
    assert all(math.isfinite(value) for value in first)


def spread() -> Any:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    assert group is not None
    cpu_parameter = nn.Parameter(torch.full((3,), float(rank)))
    gpu_parameter = nn.Parameter(torch.full((2,), float(rank), device=GPU))
    HostMemory(group, None, 1).spread([cpu_parameter, gpu_parameter], source=1)
    values: list[Tensor] = [cpu_parameter.detach(), gpu_parameter.detach().cpu()]
    return (
        [value.tolist() for value in values],
        cpu_parameter.device.type,
        gpu_parameter.device.index,
    )


@on_two_gpus
@pytest.mark.processes
def test_host_memory_spreads_over_gpus() -> None:
    for rank, values in enumerate(run_on_ranks(spread, 2, gpus=True)):
        assert values == ([[1.0] * 3, [1.0] * 2], "cpu", rank)
