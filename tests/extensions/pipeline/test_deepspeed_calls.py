"""Pipeline methods of DeepSpeed scripts besides training."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerotrial
from tests.engine.ranks import run_on_ranks
from zerolab.errors import ConfigError, EngineError
from zerotrial.extensions.pipeline import PipelineModule, ProcessTopology

pytestmark = pytest.mark.processes


def test_topology_maps_ranks_to_coordinates() -> None:
    topology = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 3, 2])
    assert topology.world_size() == 12
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert [topology.get_dim(axis) for axis in ("pipe", "data", "model", "x")] == [2, 3, 2, 0]
    for rank in range(12):
        coord = topology.get_coord(rank)
        assert rank == coord.pipe * 6 + coord.data * 2 + coord.model
        assert topology.get_rank(**coord._asdict()) == topology.mapping[coord] == rank
    assert topology.get_axis_comm_lists("pipe") == [[i, i + 6] for i in range(6)]
    assert topology.get_axis_comm_lists("model") == [[i, i + 1] for i in range(0, 12, 2)]
    assert topology.get_axis_comm_lists("x") == []
    assert topology.get_axis_list("data", 1) == [2, 3, 8, 9]
    assert topology.filter_match(pipe=1, model=0) == [6, 8, 10]
    assert topology.get_rank_repr(9) == "model_01"
    assert topology.get_rank_repr(9, omit_axes=["model"], inner_sep="", outer_sep=".") == (
        "pipe01.data01"
    )
    assert ProcessTopology(["row", "col"], [2, 2]).get_rank(row=1, col=0) == 2
    for wrong in (
        lambda: topology.get_rank(pipe=0),
        lambda: topology.get_rank(pipe=0, data=3, model=0),
        lambda: topology.get_coord(12),
    ):
        with pytest.raises(ValueError, match="must"):
            wrong()  # type: ignore[no-untyped-call]
    for axes, dims in ((["a", "a"], [1, 1]), (["a"], [0]), (["a"], [1, 2])):
        with pytest.raises(ConfigError, match="must be different names"):
            ProcessTopology(axes, dims)
    with pytest.raises(ConfigError, match="must have axes of pipe, data, model in this order"):
        PipelineModule([nn.Linear(1, 1)], topology=ProcessTopology(["data", "pipe"], [1, 1]))


def parts() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)]


@pytest.mark.parametrize(
    "container",
    [
        nn.ModuleList,
        lambda layers: nn.Sequential(*layers),
        tuple,
        iter,
        lambda layers: (layer for layer in layers),
        lambda layers: nn.ModuleDict({str(i): m for i, m in enumerate(layers)}).values(),
    ],
)
def test_layers_come_from_any_iterable(container: Callable[[Any], Any]) -> None:
    module = PipelineModule(container(parts()), num_stages=1)
    x = torch.ones(2, 4)
    torch.testing.assert_close(module(x), nn.Sequential(*parts())(x))


@pytest.mark.parametrize("wrong", ["text", nn.Linear(1, 1), nn.ModuleDict({"a": nn.Tanh()}), [], 3])
def test_invalid_layers_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="layers"):
        PipelineModule(wrong, num_stages=1)


def batches() -> Iterator[Any]:
    torch.manual_seed(1)
    return iter([(torch.randn(1, 4), torch.randn(1, 1)) for _ in range(4)])


def evaluate(stages: int, stage: int) -> bool:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    module = PipelineModule(parts(), num_stages=stages)
    engine: Any = zerotrial.initialize(model=module, config=config)[0]
    plain = nn.Sequential(*parts())
    expected = [plain(x) for x, _ in batches()]
    for count in (None, 4):
        evaluated = engine.eval_batch(batches(), num_micro_batches=count)
        if not engine.is_last_stage():
            assert evaluated is None
            continue
        assert len(evaluated) == (count or 2)
        for output, reference in zip(evaluated, expected, strict=False):
            torch.testing.assert_close(output, reference)
    loss, outputs = engine.eval_batch(batches(), return_logits=True)
    assert (loss is None) == (outputs is None) == (not engine.is_last_stage())
    # A layer that returns one number of any shape is the loss in training, as before.
    assert engine.train_batch(batches()).shape == ()
    engine.close()
    return True


@pytest.mark.parametrize(("stages", "stage"), [(1, 0), (2, 1), (1, 3)])
def test_eval_batch_without_loss_fn_returns_outputs(stages: int, stage: int) -> None:
    assert all(run_on_ranks(evaluate, 2, stages, stage))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_eval_batch_without_loss_fn_averages_scalars() -> None:
    config = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    module = PipelineModule([*parts(), Mean()], num_stages=1)
    engine: Any = zerotrial.initialize(model=module, config=config)[0]
    plain = nn.Sequential(*parts())
    expected = torch.stack([plain(x).mean() for x, _ in batches()][:2]).mean()
    torch.testing.assert_close(engine.eval_batch(batches()), expected)
    with pytest.raises(EngineError, match="pass data_iter"):
        engine.eval_batch()
    with pytest.raises(EngineError, match="train_batch"):
        engine.train_batch()
    engine.close()
