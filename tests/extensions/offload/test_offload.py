"""Optimizer states in host memory or in files: the same training, in less memory."""

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.checkpoint.test_one_rank import files_of_at_most
from tests.engine.checkpointing import all_states, make_engine, probe, train
from tests.engine.models import HAS_MUON, needs_muon
from tests.engine.ranks import run_on_ranks
from tests.engine.tensor_sizes import storage_bytes
from zerolab.config import load_engine_config
from zerolab.errors import ConfigError
from zerotrial.engine import initialize
from zerotrial.engine.protocols import Updater, UpdaterInputs
from zerotrial.engine.update.factory import choose_optimizer
from zerotrial.engine.update.in_memory import build_updater
from zerotrial.engine.update.optimizer_states import make_states, read_scalars, tensor_states
from zerotrial.extensions.offload.cpu_updater import CpuUpdater
from zerotrial.extensions.offload.paged_file import OffloadError, PagedFile
from zerotrial.extensions.offload.updater import NvmeUpdater

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "SGD": {"lr": 0.01, "momentum": 0.9, "dampening": 0.5},
    "Adagrad": {"lr": 0.01, "initial_accumulator_value": 0.1},
    "LAMB": {"lr": 0.01},
    "Muon": {"lr": 0.01},
}


def nvme(path: Path | str, **more: Any) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(path)}
    return {"offload_optimizer": offload, "reduce_bucket_size": 200, **more}


def settings(directory: str) -> dict[str, dict[str, Any]]:
    return {
        "none": {"reduce_bucket_size": 200},
        "cpu": {"reduce_bucket_size": 200, "offload_optimizer": {"device": "cpu"}},
        "nvme": nvme(directory),
    }


def train_with_each(directory: str) -> list[str]:
    """Compare losses and states over steps, a save and a load, with and without offload."""
    problems = []
    bf16 = {"bf16": {"enabled": True}}
    for name, stage, bits in [
        ("AdamW", 1, {}),
        ("SGD", 2, {}),
        ("LAMB", 2, {}),
        ("Muon", 1, bf16),
        ("AdamW", 2, bf16),
        ("AdamW", 3, bf16),
        ("Adagrad", 3, {}),
        ("LAMB", 3, bf16),
        ("Muon", 3, {}),
    ]:
        if name == "Muon" and not HAS_MUON:
            continue
        reference: Any = None
        optimizer = {"type": name, "params": OPTIMIZERS[name]}
        for device, zero in settings(f"{directory}/nvme").items():
            engine = make_engine(stage, optimizer=optimizer, scheduler=None, zero=zero, **bits)
            losses = train(engine, 3)
            engine.save_checkpoint(f"{directory}/checkpoint", tag=device)
            losses += train(engine, 2)
            states = all_states(engine)
            engine.load_checkpoint(f"{directory}/checkpoint")
            losses += train(engine, 2)
            result = (losses, engine.stage.updater.scalars(), sorted(states))
            engine.close()
            if reference is None:
                reference = (result, states)
            label = f"{name} at stage {stage} {bits} with {device}"
            if losses[3:5] != losses[5:]:
                problems.append(f"{label}: not resumed")
            if result != reference[0]:
                problems.append(f"{label}: {result} instead of {reference[0]}")
            if not all(torch.equal(states[key], reference[1][key]) for key in states):
                problems.append(f"{label}: other states")
    problems += [f"left behind: {path}" for path in Path(directory, "nvme").iterdir()]
    return problems


@pytest.mark.processes
def test_offload_is_bitwise_equal(tmp_path: Path) -> None:
    for problems in run_on_ranks(train_with_each, 2, str(tmp_path)):
        assert problems == []


def updater_inputs(
    sizes: list[int], path: Path, optimizer: str = "AdamW", **offload: Any
) -> UpdaterInputs:
    config = load_engine_config(
        {
            "train_batch_size": 1,
            "optimizer": {"type": optimizer, "params": {"lr": 0.1}},
            "zero_optimization": {
                "stage": 1,
                "offload_optimizer": {"device": "nvme", "nvme_path": str(path), **offload},
            },
        }
    )
    return UpdaterInputs(
        masters=[torch.arange(size, dtype=torch.float32) for size in sizes],
        group_indices=[0] * len(sizes),
        groups=[{}],
        optimizer_factory=choose_optimizer(config, None),
        config=config,
        device=torch.device("cpu"),
    )


def step_all(updater: Updater, sizes: list[int], publish: list[Tensor], step: int) -> None:
    for index, size in enumerate(sizes):
        gradient = torch.randn(size, generator=torch.Generator().manual_seed(100 * step + index))
        updater.step(index, gradient, 0.5, publish[index])
    updater.finish()


SHAPES = [[torch.Size([4, 6]), torch.Size([6])], [torch.Size([3, 2]), torch.Size([1])]]


def check_same_states(first: Updater, second: Updater, *, buckets: int) -> None:
    """Compare bit by bit, and close both."""
    for index in range(buckets):
        with (
            first.states(index, write=False) as actual,
            second.states(index, write=False) as expected,
        ):
            assert actual.keys() == expected.keys()
            assert all(torch.equal(actual[kind], expected[kind]) for kind in actual)
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("build", "optimizer"),
    [
        (NvmeUpdater, "LAMB"),
        pytest.param(NvmeUpdater, "Muon", marks=needs_muon),
        (CpuUpdater, "LAMB"),
        pytest.param(CpuUpdater, "Muon", marks=needs_muon),
        (CpuUpdater, "Adafactor"),
    ],
)
def test_full_parameter_offload_is_equal(
    tmp_path: Path, build: Callable[[UpdaterInputs], Updater], optimizer: str
) -> None:
    ends = [list(itertools.accumulate(s.numel() for s in shapes)) for shapes in SHAPES]
    shapes = [
        [(end - shape.numel(), end, shape) for end, shape in zip(at, bucket, strict=True)]
        for at, bucket in zip(ends, SHAPES, strict=True)
    ]
    sizes = [at[-1] for at in ends]
    inputs = replace(updater_inputs(sizes, tmp_path, optimizer), shapes=shapes)
    alike = replace(inputs, masters=[master.clone() for master in inputs.masters])
    updaters: list[Updater] = [build(inputs), build_updater(alike)]
    for step in range(3):
        published = [[torch.zeros(size, dtype=torch.bfloat16) for size in sizes] for _ in updaters]
        for updater, publish in zip(updaters, published, strict=True):
            step_all(updater, sizes, publish, step)
        assert all(torch.equal(*pair) for pair in zip(*published, strict=True))
    check_same_states(*updaters, buckets=len(sizes))


@pytest.mark.parametrize("build", [NvmeUpdater, CpuUpdater])
@pytest.mark.parametrize("optimizer", ["AdamW", "Lion", "Rprop", "ASGD", "NAdam"])
def test_offload_updaters_publish_equal_weights(
    tmp_path: Path, build: Callable[[UpdaterInputs], Updater], optimizer: str
) -> None:
    sizes = [5, 1, 7, 64]
    inputs = updater_inputs(sizes, tmp_path, optimizer)
    updaters = [
        build(inputs),
        build_updater(replace(inputs, masters=[m.clone() for m in inputs.masters])),
    ]
    published = [[torch.zeros(size, dtype=torch.bfloat16) for size in sizes] for _ in updaters]
    for step in range(4):
        for updater, publish in zip(updaters, published, strict=True):
            step_all(updater, sizes, publish, step)
        for actual, expected in zip(*published, strict=True):
            assert torch.equal(actual, expected)
    assert updaters[0].scalars() == updaters[1].scalars()
    check_same_states(*updaters, buckets=len(sizes))


@pytest.mark.parametrize("spread", [0, 300])
def test_few_buckets_are_in_memory(tmp_path: Path, spread: int) -> None:
    sizes = [10_000 - spread * index for index in range(12)]
    inputs = updater_inputs(sizes, tmp_path)
    updater = NvmeUpdater(inputs)
    publish = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
    inputs.masters.clear()
    for step in range(3):
        most = 0
        for index, size in enumerate(sizes):
            updater.step(index, torch.ones(size), 1.0, publish[index])
            by_kind = updater.tensors_by_kind()
            most = max(most, sum(storage_bytes(tensors) for tensors in by_kind.values()))
        updater.finish()
        bucket = 3 * 4 * sizes[0]
        if step > 0:
            assert most <= 4 * bucket  # of 12: read, updated, written, and memory to be used again
    assert list(tmp_path.iterdir()) == []  # the file has no name, so nothing can be left behind
    updater.close()


def test_files_have_exact_size(tmp_path: Path) -> None:
    """fp32 weights are their own masters and stay in memory."""
    page = 4096
    for stage in (1, 3):
        for bits, kinds in (({}, 2), ({"bf16": {"enabled": True}}, 2 if stage == 3 else 3)):
            engine = make_engine(stage, zero=nvme(tmp_path, reduce_bucket_size=10**6), **bits)
            numel = sum(p.numel() for p in engine.module.parameters())
            updater = engine.stage.updater
            needed = kinds * 4 * numel
            records = sum(len(bucket.records) for bucket in updater._buckets)
            for steps in (0, 2):  # all of it is taken at once
                train(engine, steps)
                used = os.fstat(updater._file._file.fileno()).st_blocks * 512
                assert needed <= used <= needed + records * page
            engine.close()


def test_changed_states_are_written_on_request(tmp_path: Path) -> None:
    sizes = [8, 8]
    updater = NvmeUpdater(updater_inputs(sizes, tmp_path))
    publish = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
    step_all(updater, sizes, publish, 0)
    for write in (True, False):
        with updater.states(1, write=write) as states:
            states["exp_avg"].fill_(3.0 if write else 4.0)
            states["master"].fill_(5.0 if write else 6.0)
    with updater.states(1, write=False) as states:
        assert states["exp_avg"].tolist() == [3.0] * 8
        assert states["master"].tolist() == [5.0] * 8
    updater.close()


def test_small_disk_is_noticed_before_training(tmp_path: Path) -> None:
    message = r"nvme_path: .*has no room for [\d,]+ bytes of optimizer states.*offload to cpu"
    with files_of_at_most(10_000), pytest.raises(OffloadError, match=message):
        make_engine(2, zero=nvme(tmp_path))
    with pytest.raises(OffloadError, match=r"nvme_path: .*Not a directory"):
        make_engine(2, zero=nvme("/dev/null/here"))
    with pytest.raises(ConfigError, match="nvme_path"):
        make_engine(2, zero={"offload_optimizer": {"device": "nvme"}})


def test_full_disk_during_training_is_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bits = {"bf16": {"enabled": True}}
    expected = make_engine(2, zero={"reduce_bucket_size": 200}, **bits)
    engine = make_engine(2, zero=nvme(tmp_path / "nvme"), **bits)
    losses = train(engine, 2)
    with files_of_at_most(4096):
        losses += train(engine, 2)
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert f"nvme_path: {tmp_path / 'nvme'}: could not write" in record.getMessage()
    assert "bytes of optimizer states" in record.getMessage()
    assert "they stay in memory" in record.getMessage()
    engine.save_checkpoint(tmp_path / "checkpoint")
    losses += train(engine, 2)
    assert losses == train(expected, 6)
    again = make_engine(2, zero=nvme(tmp_path / "nvme"), **bits)
    again.load_checkpoint(tmp_path / "checkpoint")
    assert train(again, 2) == losses[4:]
    assert probe(again) == probe(engine)
    for closing in (engine, again, expected):
        closing.close()


def test_states_of_other_shapes_are_refused_in_files(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    message = (
        r"offload_optimizer\.device: must be cpu or none for Adafactor, .*'row_var'.* got nvme"
    )
    with pytest.raises(ConfigError, match=message):
        initialize(
            model=model,
            optimizer=torch.optim.Adafactor(model.parameters()),
            config={"train_batch_size": 1, "zero_optimization": {"stage": 1, **nvme(tmp_path)}},
        )


def test_records_are_read_as_written(tmp_path: Path) -> None:
    file = PagedFile(tmp_path)
    tensors = [torch.randn(n) for n in (1, 1000, 1025, 5000)]
    places = [file.reserve(tensor.nbytes) for tensor in tensors]
    for future in [file.write(at, t) for at, t in zip(places, tensors, strict=True)]:
        future.result()
    for at, tensor in zip(places, tensors, strict=True):
        out = file.acquire(tensor.numel(), tensor.dtype)
        assert torch.equal(file.read(at, out).result(), tensor)
        file.release(out)
    larger = torch.randn(9000)
    at = file.reserve(larger.nbytes)
    file.write(at, larger).result()
    assert torch.equal(file.read(at, file.acquire(9000, larger.dtype)).result(), larger)
    file.close()


FIRST_STEPS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam with L2 decay": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    "Adam with amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1, "weight_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1, "weight_decay": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "weight_decay": 0.1, "t0": 0}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", FIRST_STEPS)
def test_prepared_states_match_first_step(name: str) -> None:
    cls, options = FIRST_STEPS[name]
    weights = torch.randn(9, generator=torch.Generator().manual_seed(0))
    results = []
    for ahead in (True, False):
        parameter = nn.Parameter(weights.clone())
        optimizer = cls([parameter], **options)
        if ahead:
            make_states(optimizer, [parameter])
            assert torch.equal(parameter.detach(), weights)
            assert parameter.grad is None
            assert read_scalars(optimizer, [(0, parameter)]).get("group0.step", 0.0) == 0.0
        for step in range(4):
            parameter.grad = torch.randn(9, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        states = tensor_states(optimizer, parameter)
        results.append((parameter.detach(), states, read_scalars(optimizer, [(0, parameter)])))
    (prepared, prepared_states, prepared_scalars), (stepped, states, scalars) = results
    assert torch.equal(prepared, stepped)
    assert prepared_scalars == scalars
    assert prepared_states.keys() == states.keys()
    assert all(torch.equal(prepared_states[kind], states[kind]) for kind in states)
