"""Tests around the engine that need a GPU; see docs/contribute/gpu.md."""

import os
import random
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.engine.stage3_models import make_batches
from tests.engine.test_cuda import GPU, MICRO, STEPS, config_of, language, make_engine, train
from zerolab.extensions.system_metrics import _gpu_sample, _open_gpus
from zerolab.launcher.devices import find_gpus
from zerotrial.data.devices import choose_device, to_device
from zerotrial.data.random_state import capture, restore
from zerotrial.engine import initialize
from zerotrial.extensions.deepspeed_api.names.accelerator import get_accelerator
from zerotrial.extensions.planner.plan import find_devices
from zerotrial.extensions.profiler import trace
from zerotrial.extensions.profiler.step_observer import memory_line
from zerotrial.extensions.profiler.timers import PhaseTimer
from zerotrial.extensions.profiler.trace import GpuTrace

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SINGLE_RANK = """
import torch, torch.distributed as dist
{start}
total = torch.ones(2, device="cuda")
dist.all_reduce(total)
found = torch.ones(1)
if {both}:
    dist.all_reduce(found)
of_gpus = dist.group.WORLD._get_backend(torch.device("cuda"))
print(of_gpus.name(), total.tolist(), torch.cuda.current_device())
dist.destroy_process_group()
"""


def test_phase_timer_uses_gpu_events() -> None:
    timer = PhaseTimer(GPU)
    matrix = torch.randn(2048, 2048, device=GPU)
    with timer.phase("outer"):
        with timer.phase("inner"):
            for _ in range(16):
                matrix = matrix @ matrix / 2048
        matrix.sum()
    result = timer.take()
    assert list(result) == ["outer", "inner"]
    assert result["inner"] > 0
    torch.cuda.synchronize()
    assert timer.take() == {}


def test_gpu_trace_measures_hidden_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_COMMUNICATES", "spin_kernel")  # replaces a collective
    side = torch.cuda.Stream()
    matrix = torch.randn(4096, 4096, device=GPU)
    # CUDA loads a kernel at its first use, which takes milliseconds.
    torch.cuda._sleep(1)
    matrix @ matrix + 1
    torch.cuda.synchronize()
    traced = GpuTrace(GPU)
    for _ in range(2):
        traced.begin()
        assert traced.runs
        with traced.phase("forward"):  # waits for the other stream, then computes briefly
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000_000)
            torch.cuda.current_stream().wait_stream(side)
            matrix + 1
        with traced.phase("backward"):  # computes in parallel, and for longer
            with torch.cuda.stream(side):
                torch.cuda._sleep(10_000_000)
            for _ in range(64):
                matrix @ matrix
        with traced.phase("step"):
            matrix + 1
        result = traced.end()
        assert result is not None
        assert result.hidden_s > 0
        assert result.waiting["forward"] > 0.75
        assert result.waiting["backward"] < 0.1
        assert result.waiting["step"] < 0.5


def test_step_shares_and_memory_line() -> None:
    config = config_of(1, "bf16", wall_clock_breakdown=True, steps_per_print=2)
    engine = make_engine(language(), config)
    train(engine, make_batches(STEPS, MICRO, 1))
    assert engine.observer.measured["forward_share"] > 0
    assert engine.observer.measured["backward_share"] > 0
    line = memory_line(engine)
    assert "GPU " in line
    assert ", at most " in line
    engine.close()


def test_gpu_random_state_is_restored() -> None:
    saved = capture()
    drawn = torch.randn(8, device=GPU), random.random()
    restore(saved)
    assert torch.equal(torch.randn(8, device=GPU), drawn[0])
    assert random.random() == drawn[1]


def test_rank_device_and_to_device() -> None:
    count = torch.cuda.device_count()
    assert [choose_device(rank).index for rank in range(count + 1)] == [*range(count), 0]
    moved = to_device({"x": [torch.ones(2)], "name": "a"}, GPU)
    assert moved["x"][0].device.type == "cuda"
    assert moved["name"] == "a"


def test_engine_loader_pins_memory() -> None:
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    initialized = initialize(
        model=model, config=config_of(1, "fp32"), training_data=data, device=GPU
    )
    (batch,) = next(iter(initialized[2]))
    assert batch.is_pinned()
    initialized[0].close()


def test_slots_metrics_and_plan_find_torch_gpus(tmp_path: Path) -> None:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    # torch may count them in another order than the driver
    assert sorted(slot.device.split(" ", 1)[1] for slot in find_gpus()) == sorted(names)
    sample = _gpu_sample(_open_gpus())
    assert sample["gpu0_memory_used_bytes"] > 0
    result = find_devices(1, tmp_path)
    assert (result.kind, result.name) == ("cuda", names[0])
    assert result.device_bytes == pytest.approx(torch.cuda.mem_get_info(0)[1], rel=0.02)
    assert result.host_bytes == psutil.virtual_memory().total


def test_deepspeed_accelerator_is_the_gpu() -> None:
    accelerator = get_accelerator()
    assert accelerator.device_name(1) == "cuda:1"
    assert accelerator.current_device_name() == f"cuda:{torch.cuda.current_device()}"
    assert accelerator.communication_backend_name() == "nccl"
    assert accelerator.device_count() == torch.cuda.device_count()
    assert accelerator.memory_allocated() == torch.cuda.memory_allocated()
    assert accelerator.total_memory() >= accelerator.available_memory() > 0
    assert accelerator.default_generator(0).device.type == "cuda"
    assert accelerator.on_accelerator(torch.ones(1, device=accelerator.current_device_name()))
    accelerator.empty_cache()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("start", "both"),
    [
        ("from zerotrial.extensions.scripts import init_distributed as start; start()", False),
        ("from zerotrial.ranks import Distributed; Distributed.from_environment(cuda=True)", True),
        (
            "from zerotrial import initialize; initialize(model=torch.nn.Linear(1, 1), "
            "config={'train_batch_size': 1}, dist_init_required=True)",
            False,
        ),
    ],
)
def test_process_group_of_gpus_uses_nccl(tmp_path: Path, start: str, both: bool) -> None:
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    completed = subprocess.run(
        [sys.executable, "-c", SINGLE_RANK.format(start=start, both=both)],
        env={**os.environ, **world, **address},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.strip() == "nccl [1.0, 1.0] 0"
