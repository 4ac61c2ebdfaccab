"""Which GPUs ranks get, and what they do there; all of these wait for one. See docs/gpu.md."""

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
from zerolab.agent.slots import find_slots, run_environment
from zerolab.contract.spec import ProfilingSpec
from zerolab.launcher.nodes import node
from zerotrial.compat.deepspeed import on_cpu
from zerotrial.compat.deepspeed.once_a_host import HostMemory
from zerotrial.engine.building.ground import choose_device
from zerotrial.engine.pipeline.module import PipelineModule
from zerotrial.engine.pipeline.runner import Runner
from zerotrial.engine.tensor import divide
from zerotrial.engine.watch.flops import ForwardProfile
from zerotrial.loop.profiling import LoopTimings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

GPU = torch.device("cuda")
COUNT = "import torch; print(torch.cuda.device_count())"
ANEW = """
        import pathlib
        begun = pathlib.Path("/proc/self/cmdline").read_text().split("\\0")
        assert "zerotrial.process.launch" in begun, begun
        assert context.device == torch.device("cuda", context.distributed.local_rank)
        assert torch.cuda.current_device() == context.device.index
"""
SPEAKS = """
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


def test_an_engine_takes_the_gpu_of_its_rank_or_the_one_that_it_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = torch.cuda.device_count()
    for local in range(count + 1):  # the last as if a launcher had shown it its own GPU only
        monkeypatch.setenv("LOCAL_RANK", str(local))
        assert choose_device(None) == torch.device("cuda", local % count)


def test_libraries_are_left_as_they_are_where_there_is_a_gpu() -> None:
    asked: list[bool] = []

    class State:
        def _prepare_backend(self, cpu: bool = False) -> None:
            asked.append(cpu)

    on_cpu._patch_accelerate(SimpleNamespace(PartialState=State))  # type: ignore[arg-type]
    State()._prepare_backend(cpu=False)
    assert asked == [False]
    module = SimpleNamespace(__name__="lightning.pytorch.strategies.deepspeed", CUDAAccelerator=int)
    on_cpu._patch_lightning(module)  # type: ignore[arg-type]
    assert module.CUDAAccelerator is int


def counted(arguments: list[str], **variables: str) -> str:
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
def test_a_run_sees_the_gpus_of_its_slots_and_a_rank_its_own_of_them(tmp_path: Path) -> None:
    slots = find_slots(None, cpu=False)
    everything = [slot.id for slot in slots]
    of_run = run_environment(slots, everything[:1])
    assert counted(["-c", COUNT], **of_run) == "1"
    over_hosts = node._environment(
        SimpleNamespace(archive=b"", slots=everything[:1], environment={})  # type: ignore[arg-type]
    )
    assert counted(["-c", COUNT], **over_hosts) == "1"
    rank = {"RANK": "0", "LOCAL_RANK": "0"}
    words = ["-m", "zerolab.launcher.rank", str(os.getpid()), str(tmp_path), "--slots=1", "--"]
    of_all = run_environment(slots, everything)
    assert counted([*words, sys.executable, "-c", COUNT], **of_all, **rank) == "1"


@pytest.mark.processes
def test_nccl_speaks_over_the_network_that_leads_to_the_first_host() -> None:
    told = counted(["-c", SPEAKS], NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,BOOTSTRAP,ENV")
    assert re.search(r"Bootstrap ?: Using lo:127\.0\.0\.1", told), told


@pytest.mark.processes
def test_ranks_of_a_trial_start_anew_and_train_on_the_gpu(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "digits")
    file = tmp_path / "digits" / "experiment.yaml"
    slots = min(2, torch.cuda.device_count())
    file.write_text(file.read_text().replace("slots_per_trial: 2", f"slots_per_trial: {slots}"))
    model = tmp_path / "digits" / "model_def.py"
    begins = "        self.context = context\n"
    assert begins in model.read_text()
    model.write_text(model.read_text().replace(begins, begins + ANEW))
    home = {"ZEROLAB_HOME": str(tmp_path / "home")}
    try:
        told = counted(["-m", "zerolab", "run", "--test", str(file)], **home)
    finally:
        counted(["-m", "zerolab", "down"], **home)
    assert "COMPLETED" in told


def test_seconds_of_modules_and_batches_are_those_of_the_gpu() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)).to(GPU)
    one = torch.randn(4096, 4096, device=GPU)
    model(one)
    numels = {name: value.numel() for name, value in model.named_parameters()}
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with ForwardProfile(model, numels) as profile:
        begun.record()
        model(one)
        ended.record()
    torch.cuda.synchronize()
    (root, *_) = profile.costs()
    # Within events on the GPU's own clock; without waiting it would be the time of the launches.
    assert root.seconds * 1000 > begun.elapsed_time(ended) / 2
    timings = LoopTimings(ProfilingSpec(enabled=True), GPU)
    timings.begin(0)
    begun.record()
    for _ in range(20):
        model(one)
    ended.record()
    timings.end()
    torch.cuda.synchronize()
    taken = timings.take()["profile_batch_seconds"]
    assert taken * 1000 > begun.elapsed_time(ended) / 2


def test_building_layers_and_measuring_shapes_draw_no_numbers_on_the_gpus() -> None:
    runner = object.__new__(Runner)
    runner._chunks, runner._device = {}, GPU
    before = torch.cuda.get_rng_state_all()
    with runner._no_trace([]):
        torch.randn(8, device=GPU)
    PipelineModule([nn.Linear(2, 2)], num_stages=1)
    assert all(map(torch.equal, torch.cuda.get_rng_state_all(), before))


def drawn() -> list[float]:
    torch.cuda.manual_seed(dist.get_rank())
    divide._draw_alike(SimpleNamespace(group=dist.group.WORLD), GPU)  # type: ignore[arg-type]
    return torch.randn(4, device=GPU).tolist()


@pytest.mark.processes
def test_tensor_ranks_draw_alike_on_their_gpus() -> None:
    first, second = run_on_ranks(drawn, 2, gpus=True)
    assert first == second
    assert all(math.isfinite(value) for value in first)


def spread() -> Any:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    assert group is not None
    here = nn.Parameter(torch.full((3,), float(rank)))
    there = nn.Parameter(torch.full((2,), float(rank), device=GPU))
    HostMemory(group, None, 1).spread([here, there], source=1)
    found: list[Tensor] = [here.detach(), there.detach().cpu()]
    return [value.tolist() for value in found], here.device.type, there.device.index


@on_two_gpus
@pytest.mark.processes
def test_what_one_rank_has_goes_to_the_others_over_the_gpus() -> None:
    for rank, found in enumerate(run_on_ranks(spread, 2, gpus=True)):
        assert found == ([[1.0] * 3, [1.0] * 2], "cpu", rank)
