"""Full tensors through ``load_state_dict`` of a model that an engine trains."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerotrial
from tests.engine.ranks import run_on_ranks
from zerotrial.engine import Engine
from zerotrial.extensions.deepspeed_api.names.zero_to_fp32 import (
    load_state_dict_from_zero_checkpoint,
)
from zerotrial.extensions.deepspeed_api.parameter_access import GatheredParameters, know


class Model(nn.Module):
    """Rows that no number of ranks divides, a tied weight, a scalar, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(5, 3)
        self.tied = self.head
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(requires_grad=False)
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (self.frozen(self.head(x)) * self.scale + self.offset).square().mean()


def values() -> dict[str, Tensor]:
    torch.manual_seed(5)
    state = {name: torch.randn(v.shape) for name, v in Model().state_dict().items()}
    return state | {name: state[name.replace("tied", "head")] for name in state}


def inputs(step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def make_engine(stage: int, kind: str = "AdamW", **more: Any) -> Engine:
    torch.manual_seed(0)
    engine = zerotrial.initialize(
        model=Model(),
        config={
            "train_batch_size": 4,
            "optimizer": {"type": kind, "params": {"lr": 0.01}},
            "zero_optimization": {"stage": stage},
            **more,
        },
    )[0]
    know(engine)
    return engine


def train(engine: Engine, steps: range) -> None:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in steps:
        engine.backward(engine(inputs(step).chunk(ranks)[rank]))
        engine.step()


def check(engine: Engine, expected: dict[str, Tensor], what: str, bound: float = 1e-6) -> None:
    for name, _ in engine.module.named_parameters():
        actual = engine.full(name)
        assert actual is not None
        gap = float((actual.float() - expected[name]).abs().max())
        assert gap <= bound, (what, name, gap)


def restore_own_state(stage: int) -> None:
    """At stage 3, ``state_dict`` returns sharded tensors."""
    engine = make_engine(stage)
    train(engine, range(1))
    state = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    expected = {name: copy_of(engine, name) for name, _ in engine.module.named_parameters()}
    for options in ({}, {"assign": True}):
        train(engine, range(1, 2))
        engine(inputs(0)[:1])  # keeps the root gathered
        engine.module.load_state_dict(state, **options)
        check(engine, expected, str(options), 0.0)
    train(engine, range(1, 2))
    engine.close()


def copy_of(engine: Engine, name: str) -> Tensor:
    full = engine.full(name)
    assert full is not None
    return full.float().clone()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_own_state_is_restored(stage: int, ranks: int) -> None:
    run_on_ranks(restore_own_state, ranks, stage)


def load_everywhere(stage: int, directory: str) -> None:
    state = values()
    for kind in ("AdamW", "Lamb"):
        engine = make_engine(stage, kind)
        train(engine, range(1))
        engine(inputs(0)[:1])  # keeps the root gathered
        engine.module.load_state_dict(state)
        check(engine, state, kind, 0.0)
        engine.save_checkpoint(f"{directory}/{stage}{kind}")
        train(engine, range(1))
        reference = Model()
        reference.load_state_dict(state)
        moved = max(
            float((engine.full(n) - p.detach()).abs().max())
            for n, p in reference.named_parameters()
        )
        assert 0 < moved < 0.2, (kind, moved)
        engine.module.load_state_dict(state, assign=True)
        assert engine.module.head is engine.module.tied
        check(engine, state, "assign", 0.0)
        with pytest.raises(RuntimeError, match="size mismatch"):
            engine.module.load_state_dict(state | {"head.bias": torch.zeros(4)})
        with pytest.raises(RuntimeError, match="Missing key"):
            engine.module.load_state_dict({"scale": state["scale"]})
        part = {"0.weight": torch.ones(5, 5)}
        engine.module.blocks.load_state_dict(part, strict=False)
        check(engine, state | {"blocks.0.weight": part["0.weight"]}, "part", 0.0)
        load_state_dict_from_zero_checkpoint(engine.module, f"{directory}/{stage}{kind}")
        check(engine, state, "checkpoint", 0.0)
        engine.close()


def load_gathered(stage: int, directory: str) -> None:
    state, rank = values(), dist.get_rank() if dist.is_initialized() else 0
    for modifier, all_ranks in ((0, False), (0, True), (None, True)):
        engine = make_engine(stage)
        train(engine, range(1))
        parameters = list(engine.module.parameters())
        with GatheredParameters(parameters, modifier_rank=modifier):
            if all_ranks or rank == modifier:
                engine.module.load_state_dict(state)
            else:
                engine.module.offset.copy_(state["offset"])
            full = engine.module.state_dict()
            if all_ranks or rank == modifier:
                for name, value in full.items():
                    assert torch.equal(value, state[name]), name
        check(engine, state, f"gathered {modifier} {all_ranks}", 0.0)
        with GatheredParameters(engine.module.parameters()):
            load_state_dict_from_zero_checkpoint(engine.module, f"{directory}/{stage}AdamW")
        check(engine, state, "checkpoint within", 0.0)
        train(engine, range(1))
        engine.close()


def bf16(stage: int) -> None:
    state = values()
    engine = make_engine(stage, bf16={"enabled": True})
    engine.module.load_state_dict(state)
    check(engine, state, "bf16", 0.02)  # frozen ones and scalars are rounded
    train(engine, range(1))
    check(engine, state, "bf16 trained", 0.05)
    engine.close()


def every_case(directory: str, stages: tuple[int, ...]) -> None:
    for stage in stages:
        for case in (load_everywhere, load_gathered):
            case(stage, directory)
        bf16(stage)


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [(1, (0, 1, 2, 3)), (2, (0, 1, 2, 3)), pytest.param(4, (2, 3), marks=pytest.mark.soak)],
    ids=str,
)
def test_load_state_dict_takes_full_tensors(
    ranks: int, stages: tuple[int, ...], tmp_path: Path
) -> None:
    if ranks == 1:
        every_case(str(tmp_path), stages)
    else:
        run_on_ranks(every_case, ranks, str(tmp_path), stages)


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (2, True)])
def test_copies_of_a_trained_model_load_separately(stage: int, bf16: bool) -> None:
    state = values()
    engine = make_engine(stage, bf16={"enabled": bf16})
    before = {name: engine.full(name) for name, _ in engine.module.named_parameters()}
    copied = copy.deepcopy(engine.module)
    copied.load_state_dict(state, assign=True)
    assert copied.scale.data_ptr() == state["scale"].data_ptr()
    check(engine, before, "copied", 0.0)
    engine.close()
    engine.module.load_state_dict(state, assign=True)
    assert engine.module.scale.data_ptr() == state["scale"].data_ptr()
