"""Gradient norm of a model distributed over ranks, and which ranks count."""

import logging
import logging.handlers
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerotrial
from tests.engine.ranks import run_on_ranks
from zerolab.errors import ConfigError
from zerotrial.engine.mesh import Axis, Mesh, Tie
from zerotrial.extensions.mpu import mesh_of

pytestmark = pytest.mark.processes

RANKS, STEPS, CLIP, LR = 4, 3, 1.0, 0.1
FEATURES, ROWS = 3, 8
LAYOUTS = [(4, 1, 1), (1, 1, 4), (2, 1, 2), (2, 2, 1), (1, 2, 2)]
"""Ranks along pipe, data and tensor."""

_groups: dict[tuple[int, int, int], list[Any]] = {}
"""Made once for each layout, since that takes long."""


class _SumBackward(torch.autograd.Function):
    """Entry of a replicated activation into a sharded matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        if ctx.group is not None:
            dist.all_reduce(total, group=ctx.group)
        return total, None


class Part(nn.Module):
    """A pipeline stage, or the rows of it that one tensor-parallel rank has."""

    def __init__(self, pipe: int, rows: slice, group: Any = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(pipe)
        weight = torch.randn(ROWS, FEATURES, generator=generator)[rows]
        self.gain = nn.Parameter(torch.linspace(1, 2 + pipe, FEATURES))  # replicated on every rank
        self.matrix = nn.Linear(FEATURES, len(weight), bias=False)
        self.matrix.weight = nn.Parameter(weight.clone())
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        hidden = _SumBackward.apply(x * self.gain, self._group)
        return self.matrix(hidden).square().sum()


def rows_of(step: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return torch.randn(FEATURES, generator=generator)


@dataclass
class Grid:
    """Fake ``mpu``; subclasses define the names of its groups."""

    pipe: Any
    data: Any
    tensor: Any
    model: Any

    def get_data_parallel_group(self) -> Any:
        return self.data


class AxesGrid(Grid):
    def get_tensor_model_parallel_group(self) -> Any:
        return self.tensor

    def get_pipeline_model_parallel_group(self) -> Any:
        return self.pipe


class DeepSpeedGrid(Grid):
    def get_slice_parallel_group(self) -> Any:
        return self.tensor

    def get_pipe_parallel_group(self) -> Any:
        return self.pipe

    def get_model_parallel_group(self) -> Any:
        return self.model


class OneGroup(Grid):
    def get_model_parallel_group(self) -> Any:
        return self.model


class NoTensor(OneGroup):
    def get_pipe_parallel_group(self) -> Any:
        return self.pipe


def grid_of(layout: tuple[int, int, int], kind: type[Grid]) -> tuple[Grid, tuple[int, int, int]]:
    """Create the groups of this rank; return them and its position."""
    ranks = torch.arange(RANKS).view(layout)
    position = tuple(int(i) for i in (ranks == dist.get_rank()).nonzero()[0])
    if layout not in _groups:
        lines = (
            ranks.permute(1, 2, 0).reshape(-1, layout[0]),
            ranks.permute(0, 2, 1).reshape(-1, layout[1]),
            ranks.reshape(-1, layout[2]),
            ranks.permute(1, 0, 2).reshape(layout[1], -1),
        )
        _groups[layout] = [dist.new_subgroups_by_enumeration(line.tolist())[0] for line in lines]
    return kind(*_groups[layout]), (position[0], position[1], position[2])


def part_of(layout: tuple[int, int, int], position: tuple[int, int, int], group: Any) -> Part:
    cut = ROWS // layout[2]
    part = Part(position[0], slice(position[2] * cut, (position[2] + 1) * cut), group)
    if layout[2] > 1:
        part.matrix.weight.model_parallel = True
    return part


def engine_of(part: Part, mpu: Any, stage: int) -> Any:
    return zerotrial.initialize(
        model=part,
        mpu=mpu,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": CLIP,
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 10},
        },
    )[0]


def train(stage: int, layout: tuple[int, int, int], kind: type[Grid]) -> Any:
    mpu, position = grid_of(layout, kind)
    part = part_of(layout, position, mpu.tensor if layout[2] > 1 else None)
    engine = engine_of(part, mpu, stage)
    norms = []
    for step in range(STEPS):
        engine.backward(engine(rows_of(step, position[1])))
        norms.append(engine.step().grad_norm)
    weights = {name: weight.tolist() for name, weight in engine.stage.full_weights()}
    engine.close()
    return norms, weights, position


def spread(stage: int) -> dict[str, Any]:
    results = {}
    for layout in LAYOUTS:
        kinds: list[type[Grid]] = [DeepSpeedGrid]
        if layout == (2, 1, 2):
            kinds.append(AxesGrid)
        if RANKS in layout:
            kinds.append(OneGroup)
        for kind in kinds:
            results[f"{layout} {kind.__name__}"] = train(stage, layout, kind)
    return results


def refused() -> dict[str, str]:
    """Return the error for an mpu that does not define which parameters count."""
    layout = (2, 1, 2)
    errors = {}
    for name, kind in (("one group", OneGroup), ("no tensor", NoTensor), ("no data", object)):
        mpu, position = grid_of(layout, kind) if kind is not object else (object(), (0, 0, 0))
        part = part_of(layout, position, None)
        if name == "one group":
            setattr(part, f"only{position[0]}", nn.Linear(2, 2))
        try:
            mesh_of(mpu, part)
        except ConfigError as error:
            errors[name] = str(error)
    return errors


def inconsistent_replicas() -> list[str]:
    """Return the warning for differing replicated values."""
    mpu, position = grid_of((2, 1, 2), OneGroup)
    heard = logging.handlers.BufferingHandler(capacity=100)
    logger = logging.getLogger("zerotrial.extensions.mpu")
    logger.addHandler(heard)
    mesh_of(mpu, part_of((2, 1, 2), position, None))
    logger.removeHandler(heard)
    plain = nn.Linear(2, 2)  # nothing is marked: the engine's plan names the axis
    meshes = [mesh_of(mpu, plain, tensor_size=size) for size in (1, 4)]
    assert [(mesh.pipe.size, mesh.tensor.size) for mesh in meshes] == [(4, 1), (1, 4)]
    return [record.getMessage() for record in heard.buffer]


def group_ranks() -> list[dict[str, list[int]]]:
    """Return the ranks along each axis of created meshes, and the owners of a tied parameter."""
    results = []
    for axes in ({"pipe": 2}, {"pipe": 2, "tensor": 2}, {"shard": 2}):
        mesh = Mesh.make(dist.group.WORLD, **axes)
        names = ("pipe", "data", "tensor", "shard", "replicate", "saving")
        results.append({name: _members(getattr(mesh, name)) for name in names})
        tied, untied = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        Tie("embedding", mesh.pipe).put_on(tied)
        results[-1]["counts"] = [
            len(mesh.counted_parameters([tied])),
            len(mesh.counted_parameters([untied])),
        ]
    return results


def _members(axis: Axis) -> list[int]:
    if axis.group is None:
        return [dist.get_rank()]
    return dist.get_process_group_ranks(axis.group)


def invalid_mesh() -> list[str]:
    """Return the errors for layouts that do not fit the number of ranks."""
    errors = []
    for axes in ({"pipe": 3}, {"pipe": 8}, {"pipe": 2, "shard": 4}):
        with pytest.raises(ConfigError) as caught:
            Mesh.make(dist.group.WORLD, **axes)
        errors.append(str(caught.value))
    return errors


def all_cases(stages: tuple[int, ...]) -> Any:
    return (
        [spread(stage) for stage in stages],
        refused(),
        inconsistent_replicas(),
        group_ranks(),
        invalid_mesh(),
    )


def reference(layout: tuple[int, int, int]) -> tuple[list[float], list[Part]]:
    """Return the result of the full model in one process, in fp64."""
    parts = [Part(pipe, slice(0, ROWS)).double() for pipe in range(layout[0])]
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=LR)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(layout[1]):
            for part in parts:
                (part(rows_of(step, replica).double()) / layout[1]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, CLIP)))
        optimizer.step()
    return norms, parts


@pytest.fixture(scope="module")
def rank_results() -> list[Any]:
    return run_on_ranks(all_cases, RANKS, (0, 1, 2, 3))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_norm_and_weights_match_one_process(
    rank_results: list[Any], layout: tuple[int, int, int], stage: int
) -> None:
    norms, parts = reference(layout)
    for spreads, *_ in rank_results:
        runs = {k: run for k, run in spreads[stage].items() if k.startswith(str(layout))}
        assert runs
        for norm, weights, (pipe, _, tensor) in runs.values():
            assert norm == pytest.approx(norms, rel=1e-6)
            assert weights["gain"] == pytest.approx(parts[pipe].gain.tolist(), rel=1e-5)
            cut = ROWS // layout[2]
            rows = parts[pipe].matrix.weight[tensor * cut : (tensor + 1) * cut]
            torch.testing.assert_close(
                torch.tensor(weights["matrix.weight"]), rows.float(), rtol=1e-5, atol=1e-6
            )


def test_ambiguous_mpu_is_refused(rank_results: list[Any]) -> None:
    for _, refusals, *_ in rank_results:
        assert "only0.weight" in refusals["one group"]
        assert "get_tensor_model_parallel_group" in refusals["one group"]
        assert "must give get_tensor_model_parallel_group()" in refusals["no tensor"]
        assert "must give get_data_parallel_group()" in refusals["no data"]


def test_differing_replicated_values_are_warned_about(rank_results: list[Any]) -> None:
    for _, _, lines, *_ in rank_results:
        (line,) = lines
        assert "these differ: gain; mark sharded" in line


def test_one_process_counts_every_parameter() -> None:
    part = Part(0, slice(0, ROWS))
    assert Mesh().counted_parameters(part.parameters()) == frozenset(part.parameters())


def test_mesh_order_is_pipe_data_tensor(rank_results: list[Any]) -> None:
    for rank, (_, _, _, (stages, both, hybrid), _) in enumerate(rank_results):
        other = (rank + 2) % 4
        assert stages["pipe"] == both["pipe"] == sorted([rank, other])
        assert stages["data"] == both["tensor"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert stages["tensor"] == both["data"] == [rank]
        assert stages["shard"] == stages["data"]
        assert hybrid["data"] == stages["saving"] == both["saving"] == [0, 1, 2, 3]
        assert hybrid["shard"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert hybrid["replicate"] == sorted([rank, other])


def test_replicated_parameter_counts_on_first_rank(
    rank_results: list[Any],
) -> None:
    for rank, (_, _, _, (stages, both, _), _) in enumerate(rank_results):
        assert stages["counts"] == [rank < 2, 1]
        assert both["counts"] == [rank == 0, rank % 2 == 0]


def test_layout_with_wrong_number_of_ranks_is_refused(rank_results: list[Any]) -> None:
    for *_, (indivisible, many, shard) in rank_results:
        assert "pipeline stages x tensor-parallel size = 3 x 1 = 3, got 4" in indivisible
        assert "must be a multiple of" in many
        assert "must divide the data-parallel size 2, got 4" in shard
