"""Checkpoints of tensor-parallel models, resumed in any other layout."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import zerotrial
from tests.engine.ranks import run_on_ranks
from tests.engine.tensor_models import (
    ACCUMULATION,
    CONFIG,
    PLANS,
    SmallGpt,
    loss_of,
    reference,
    tokens_of,
    train,
)
from zerotrial.engine.checkpoint.shards import ShardReader, ranges_of, write_tensors
from zerotrial.engine.module.shard_spec import ShardSpec
from zerotrial.engine.protocols import Piece

LAYOUTS: list[tuple[int, int]] = [(2, 1), (4, 2), (2, 3), (1, 3), (1, 0)]
"""Tensor-parallel ranks of four, and stage. Each takes up what the one before it saved."""


def engine_of(tensor: int, stage: int, *, frozen: bool = False) -> Any:
    config = {
        **CONFIG,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 700},
        "tensor_parallel": {"size": tensor, "plan": PLANS["whole"]},
    }
    model = SmallGpt(dist.get_rank() if dist.is_initialized() else 9)
    model.blocks[0].up.weight.requires_grad_(not frozen)
    return zerotrial.initialize(model=model, config=config)[0]


def handed_on(directory: str) -> list[list[tuple[float, float]]]:
    """Each layout trains a step and saves; the next one resumes from it."""
    losses = []
    for number, (tensor, stage) in enumerate(LAYOUTS):
        engine = engine_of(tensor, stage)
        if number:
            engine.load_checkpoint(directory)
        losses.append(train(engine, range(number, number + 1)))
        engine.save_checkpoint(directory)
        if (tensor, stage) == (2, 3):
            engine.export(f"{directory}/weights.safetensors")
            assert engine.full("blocks.0.up.weight", "exp_avg").shape == (64, 16)
            assert len(engine.full_state_dict()) == (17 if dist.get_rank() == 0 else 0)
        engine.close()
    return losses


def half(engine: Any, step: int, part: slice) -> None:
    data = engine.mesh.data
    for micro in tokens_of(step).chunk(ACCUMULATION)[part]:
        engine.backward(loss_of(engine, micro.chunk(data.size)[data.rank]))
        engine.step()


def in_mid_window(directory: str) -> dict[str, list[float]]:
    """Saved after two of four micro-batches, and taken up by the same layout and by others."""
    engine = engine_of(2, 1)
    half(engine, 0, slice(0, 2))
    engine.save_checkpoint(directory)
    half(engine, 0, slice(2, 4))
    norms = {"uninterrupted": [engine.get_global_grad_norm()]}
    engine.close()
    for tensor, stage in ((2, 1), (4, 2), (1, 3)):
        engine = engine_of(tensor, stage)
        engine.load_checkpoint(directory)
        half(engine, 0, slice(2, 4))
        norms[f"{tensor} {stage}"] = [engine.get_global_grad_norm()]
        engine.close()
    return norms


def frozen_layer(directory: str) -> list[bool]:
    """A cut layer is frozen when it is saved, and trained when it is loaded."""
    engine = engine_of(2, 1, frozen=True)
    engine.save_checkpoint(directory)
    expected = engine.full("blocks.0.up.weight")
    engine.close()
    equal = []
    for frozen in (True, False):
        engine = engine_of(4, 1, frozen=frozen)
        engine.load_checkpoint(directory, load_optimizer_states=False)
        equal.append(torch.equal(engine.full("blocks.0.up.weight"), expected))
        engine.close()
    return equal


def all_cases(directory: str) -> Any:
    return (
        handed_on(f"{directory}/on"),
        in_mid_window(f"{directory}/mid"),
        frozen_layer(f"{directory}/frozen"),
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results(directory: Path) -> list[Any]:
    return run_on_ranks(all_cases, 4, str(directory))


@pytest.mark.processes
def test_checkpoint_resumes_in_each_layout(results: list[Any], directory: Path) -> None:
    expected, model = reference(len(LAYOUTS) + 1)
    for handed, *_ in results:
        for steps, target in zip(handed, expected, strict=False):
            assert steps[0] == pytest.approx(target, abs=1e-5)
    single = engine_of(1, 0)  # one process, without a tensor axis
    single.load_checkpoint(directory / "on")
    (last,) = train(single, range(len(LAYOUTS), len(LAYOUTS) + 1))
    single.close()
    assert last == pytest.approx(expected[-1], abs=1e-5)
    for name, weight in single.module.named_parameters():
        if not name.endswith("qkv.bias"):
            torch.testing.assert_close(weight, model.get_parameter(name), rtol=1e-4, atol=1e-4)


@pytest.mark.processes
def test_export_of_sharded_model_is_full(results: list[Any], directory: Path) -> None:
    _, model = reference(3)
    exported = safetensors.torch.load_file(directory / "on" / "weights.safetensors")
    assert exported.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        if not name.endswith("qkv.bias"):
            torch.testing.assert_close(exported[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.processes
def test_pending_gradients_resume_in_other_layouts(
    results: list[Any],
) -> None:
    for _, norms, _ in results:
        (expected,) = norms.pop("uninterrupted")
        assert [norm for (norm,) in norms.values()] == pytest.approx([expected] * 3, rel=1e-5)


@pytest.mark.processes
def test_frozen_layer_between_save_and_load(
    results: list[Any],
) -> None:
    assert all(equal == [True, True] for *_, equal in results)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_part_is_read_from_any_parts(tmp_path: Path, dim: int, blocks: int) -> None:
    full = torch.randn(12, 12, 12)
    for parts in (1, 2, 4):
        entries = []
        for part in range(parts):
            cut = ShardSpec(full.shape, dim, part, parts, blocks)
            local = cut.take(full).view(-1)
            middle = len(local) // 3  # a bucket may end anywhere
            for a, b in ((0, middle), (middle, len(local))):
                piece = Piece("w", cut.part_shape, a, b, {"master": local[a:b]})
                entries += list(ranges_of([piece], lambda _, cut=cut: cut.span))
        folder = tmp_path / f"{parts}"
        folder.mkdir()
        write_tensors(folder, "rank", entries)
        with ShardReader(folder.iterdir()) as reader:
            for size in (1, 2, 4):
                cut = ShardSpec(full.shape, dim, size - 1, size, blocks)
                expected = cut.take(full).view(-1)[5:]
                out = torch.full_like(expected, -1)
                reader.read_into("w", "master", 5, out, cut.span)
                assert torch.equal(out, expected)
        write_tensors(folder, "less", entries[:-1])
        with ShardReader(folder.glob("less-*")) as reader:
            assert reader.missing("w", "master", 0, full.numel()) is not None


def test_parts_join_to_the_full_tensor() -> None:
    linear = nn.Linear(6, 12)
    cuts = [ShardSpec(linear.weight.shape, 0, part, 2, 3) for part in range(2)]
    parts = [cut.take(linear.weight.detach()) for cut in cuts]
    assert parts[0].shape == cuts[0].part_shape == (6, 6)
    assert torch.equal(cuts[0].join(parts), linear.weight)
    assert torch.equal(parts[1][:2], linear.weight[2:4])
