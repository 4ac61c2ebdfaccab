"""ZeRO-Infinity: parameters, gradients and states in files, and a model larger than the memory."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerotrial
from tests.disks import mounted
from tests.engine.checkpointing import make_engine, train
from tests.engine.ranks import run_on_ranks
from zerolab.errors import ConfigError, EngineError
from zerotrial.engine import model_in_files
from zerotrial.engine.checkpoint import shards
from zerotrial.extensions.offload import parameters
from zerotrial.extensions.offload.mapped_files import (
    FileMemory,
    is_in_file,
    read_ahead,
    release,
    warn_of_memory,
)

WIDTH, BLOCKS, STEPS = 512, 80, 1
"""Blocks of 1 MiB: 80 MiB of weights, and as much again of gradients and of each moment."""

LIMIT = 72 << 20
"""Bytes that a process may allocate after the start of the build of its model.

A quarter of it is for the buffers of checkpoints and the stacks of the threads that write them.
"""


def in_files(path: Path | str) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(path)}
    return {"offload_param": offload, "offload_optimizer": offload}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.tanh(self.mix(x))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def status(key: str) -> int:
    """Bytes that the system counts for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024


def steps_of(engine: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + micro)
            losses.append(
                float(engine.backward(engine(torch.randn(2, WIDTH, generator=generator))))
            )
            engine.step()
    return losses


def engine_of(model: nn.Module, zero: dict[str, Any]) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.01,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, **zero},
    }
    return zerotrial.initialize(model=model, config=config)[0]


def train_under_a_limit(directory: str, device: str) -> dict[str, Any]:
    small = make_engine(3, zero=in_files(directory))  # imports and threads
    train(small, 1)
    small.close()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + LIMIT, most))
    Path("/proc/self/clear_refs").write_text("5")  # the highest use counts from here
    before, before_anonymous = status("VmRSS"), status("RssAnon")
    shards._FILE_BYTES = 8 << 20  # a checkpoint is written from twice as much
    try:
        if device == "none":
            engine = engine_of(Tower(), {})
            return {"losses": steps_of(engine, 0, STEPS)}
        with model_in_files(directory):
            model = Tower()
        engine = engine_of(model, in_files(directory))
        losses = steps_of(engine, 0, STEPS)
        peak = status("VmHWM") - before
        engine.save_checkpoint(f"{directory}/checkpoint")
        losses += steps_of(engine, STEPS, 1)
        # A checkpoint's files are mapped to be read: that is counted, and is no memory.
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        engine.load_checkpoint(f"{directory}/checkpoint")
        anonymous = status("RssAnon") - before_anonymous
        again = steps_of(engine, STEPS, 1)
        engine.close(give_back=False)
    except (MemoryError, RuntimeError) as error:
        return {"error": str(error)}
    return {"losses": losses, "again": again, "peak": peak, "loaded": anonymous}


def train_freely() -> list[float]:
    engine = engine_of(Tower(), {})
    losses = steps_of(engine, 0, STEPS + 1)
    engine.close(give_back=False)
    return losses


@pytest.mark.processes
def test_model_larger_than_memory_trains_and_is_saved(tmp_path: Path) -> None:
    weights = 4 * BLOCKS * WIDTH**2
    assert weights > LIMIT
    (actual,) = run_on_ranks(train_under_a_limit, 1, str(tmp_path), "nvme")
    assert "error" not in actual, actual
    assert actual["peak"] < LIMIT
    assert actual["loaded"] < LIMIT
    assert actual["losses"][-2:] == actual["again"]
    (expected,) = run_on_ranks(train_freely, 1)
    assert actual["losses"] == expected  # to the last bit
    (refused,) = run_on_ranks(train_under_a_limit, 1, str(tmp_path), "none")
    assert "error" in refused


def one_more(engine: Any) -> None:
    generator = torch.Generator().manual_seed(engine.micro_steps)
    engine.backward(engine(torch.randn(2, 6, generator=generator)))
    engine.step()


def train_with_and_without(directory: str) -> int:
    """Losses over steps, a save in the middle of a window, and a load, to the last bit."""
    states_in_files = in_files(directory)["offload_optimizer"]
    bf16 = {"bf16": {"enabled": True}}
    cases: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ({}, {}, states_in_files),
        (bf16, {"sub_group_size": 100}, {"device": "cpu"}),
        ({}, {"stage3_max_live_parameters": 1000}, {"device": "none"}),
    ]
    for bits, zero, states in cases:
        results: dict[str, Any] = {}
        offload = {**in_files(directory), "offload_optimizer": states}
        for name, block in (("plain", {}), ("files", offload)):
            steps = {"train_batch_size": None, "train_micro_batch_size_per_gpu": 2}
            engine = make_engine(
                3, zero={**zero, **block}, gradient_accumulation_steps=2, **steps, **bits
            )
            losses = train(engine, 3)
            one_more(engine)
            engine.save_checkpoint(f"{directory}/checkpoint", tag=name)
            one_more(engine)
            norm = engine.get_global_grad_norm()
            engine.load_checkpoint(f"{directory}/checkpoint", tag="plain")  # the other's too
            one_more(engine)
            assert engine.get_global_grad_norm() == norm
            losses += train(engine, 1)
            weights = engine.full_state_dict()
            engine.close(give_back=False)
            results[name] = (losses, norm, weights)
        plain, files = results["plain"], results["files"]
        assert plain[:2] == files[:2], (bits, zero)
        torch.testing.assert_close(plain[2], files[2], rtol=0, atol=0)
    return len(cases)


class Rooted(nn.Sequential):
    """Has a weight in the root unit."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def read_ahead_of_use(directory: str, kind: type[nn.Sequential]) -> list[str]:
    """Return the order of requests and gathers of units in a step."""
    trace: list[str] = []
    turns: list[Any] = []
    begin, ask = parameters._ReadAhead.begin, parameters.read_ahead

    def requested(shard: Tensor) -> None:
        (which,) = [i for i, unit in enumerate(turns[-1]._shards) if any(s is shard for s in unit)]
        trace.append(f"ask for {which}")
        ask(shard)

    def begun(self: Any, index: int) -> None:
        turns.append(self)
        trace.append(f"gather {index}")
        begin(self, index)

    parameters._ReadAhead.begin, parameters.read_ahead = begun, requested  # type: ignore[method-assign]
    try:
        engine = engine_of(kind(*(Block() for _ in range(3))), in_files(directory))
        loss = engine(torch.ones(2, WIDTH)).square().mean()
        forward = len(trace)
        engine.backward(loss)
        engine.close(give_back=False)
    finally:
        parameters._ReadAhead.begin, parameters.read_ahead = begin, ask  # type: ignore[method-assign]
    # A unit may be gathered early, and then once more, to no effect.
    return [*dict.fromkeys(trace[:forward]), "backward", *dict.fromkeys(trace[forward:])]


def with_traces(directory: str) -> tuple[int, list[list[str]]]:
    kinds = (nn.Sequential, Rooted)
    return train_with_and_without(directory), [read_ahead_of_use(directory, k) for k in kinds]


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_from_files_is_bitwise_equal(tmp_path: Path, ranks: int) -> None:
    results = run_on_ranks(with_traces, ranks, str(tmp_path))
    assert [count for count, _ in results] == [3] * ranks
    for _, (tower, rooted) in results:
        assert tower == [
            *("gather 0", "ask for 1", "gather 1", "ask for 2", "gather 2", "backward"),
            *("gather 2", "ask for 1", "gather 1", "ask for 0", "gather 0"),
        ]
        # The root is gathered first and stays gathered until the last backward.
        assert rooted[rooted.index("backward") :] == [
            *("backward", "gather 0", "ask for 3", "gather 3", "ask for 2", "gather 2"),
            *("ask for 1", "gather 1", "ask for 0"),
        ]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]  # the files have no names


def test_values_survive_the_release_of_their_pages(tmp_path: Path) -> None:
    files = FileMemory(tmp_path)
    first, second = files.allocate(5000, torch.float32), files.copy(torch.arange(7.0))
    assert is_in_file(first[3:])
    assert not is_in_file(torch.zeros(3))
    first.fill_(2.5)
    for value in (first, second, first[1000:2000]):
        release(value)
        read_ahead(value)
    assert first.eq(2.5).all()
    assert second.tolist() == list(range(7))
    assert files.allocate(0, torch.float32).numel() == 0
    assert not list(tmp_path.iterdir())
    ordinary = torch.ones(5000)
    release(ordinary)  # private memory would lose its values
    assert ordinary.eq(1).all()


def test_small_or_memory_backed_disk_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(tmp_path / "small", "1m") as folder:
        with pytest.raises(EngineError, match=r"has no room for [\d,]+ .*; choose a larger disk"):
            FileMemory(folder).allocate(1, torch.float32)
        warn_of_memory(folder / "inside", "nvme_path")
    (reported,) = [record.getMessage() for record in caplog.records]
    assert reported.endswith(
        "inside is a file system in memory (tmpfs): offloading there saves no memory"
    )


def test_unsupported_uses_of_files_are_refused_with_reason(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nvme_path: must be .* got /dev/null/here \(Not a dir"):
        engine_of(nn.Linear(2, 2), in_files("/dev/null/here"))
    with pytest.raises(ConfigError, match=r"offload_param\.nvme_path: is required"):
        engine_of(nn.Linear(2, 2), {"offload_param": {"device": "nvme"}})
    with pytest.raises(ConfigError, match="an optimizer that is not elementwise"):
        make_engine(3, zero=in_files(tmp_path), optimizer={"type": "LAMB"})
    with pytest.raises(ConfigError, match="copies all that is saved to memory"):
        make_engine(3, zero=in_files(tmp_path), checkpoint={"writer": {"decoupled": True}})
