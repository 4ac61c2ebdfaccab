"""Modules that stage 3 gathers as one unit: ``set_z3_leaf_modules`` and its relatives."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from zerotrial.extensions.deepspeed_api.initialize import initialize
from zerotrial.extensions.deepspeed_api.names import utils

pytestmark = pytest.mark.processes


class Expert(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(x).relu()
        return out


class GatedExpert(Expert):
    pass


class Experts(nn.Module):
    """Experts of which each batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert(), GatedExpert(), Expert()])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts[int(x.sum() > 0)](x)
        return out


def other_expert() -> type[nn.Module]:
    """Make another class of the name Expert."""
    return type("Expert", (nn.Module,), {"__module__": "elsewhere"})


def model() -> nn.Module:
    return nn.Sequential(Experts(), nn.ReLU(), Experts())


def test_classes_match_subclasses() -> None:
    parts = model()
    actual = utils.set_z3_leaf_modules(parts, [Expert])
    assert [type(part) for part in actual] == [Expert, GatedExpert, Expert] * 2
    assert utils.get_z3_leaf_modules(parts) == actual
    assert utils.unset_z3_leaf_modules(parts, [GatedExpert]) == [actual[1], actual[4]]
    assert utils.get_z3_leaf_modules(parts) == [part for part in actual if type(part) is Expert]
    assert utils.set_z3_leaf_modules(parts, [nn.Module])[-1] is parts


def test_names_match_with_and_without_module() -> None:
    parts = model()
    assert len(utils.set_z3_leaf_modules(parts, ["Expert"])) == 4
    assert len(utils.set_z3_leaf_modules(parts, ["torch.nn.modules.activation.ReLU"])) == 1
    assert len(utils.set_z3_leaf_modules(parts, [f"{__name__}.Experts", "ReLU"])) == 3


def test_no_match_is_an_error() -> None:
    parts = model()
    for call in (utils.set_z3_leaf_modules, utils.unset_z3_leaf_modules):
        for classes in ([nn.Conv2d], ["Nowhere"], ["elsewhere.Expert"], []):
            with pytest.raises(ValueError, match="No modules of type"):
                call(parts, classes)
            assert call(parts, classes, raise_if_not_found=False) == []
    with pytest.raises(TypeError, match="must be a list of classes"):
        utils.set_z3_leaf_modules(parts, [3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="must be a list of classes"):
        utils.set_z3_leaf_modules(parts, Expert)  # type: ignore[arg-type]


def test_classes_with_equal_names_are_distinct() -> None:
    parts = nn.ModuleList([Expert(), other_expert()()])
    assert utils.set_z3_leaf_modules(parts, [Expert]) == [parts[0]]
    assert utils.get_z3_leaf_modules(parts) == [parts[0]]


def test_marks_by_name_and_suffix() -> None:
    parts = model()
    actual, missing = utils.set_z3_leaf_modules_by_name(
        parts, ["0", "nowhere"], raise_if_not_found=False
    )
    assert (actual, missing) == ([parts[0]], ["nowhere"])
    with pytest.raises(ValueError, match="nowhere"):
        utils.set_z3_leaf_modules_by_name(parts, ["nowhere"])
    actual, missing = utils.set_z3_leaf_modules_by_suffix(parts, ["experts.1", "up"])
    assert len(actual) == 8
    assert missing == []
    utils.set_z3_leaf_modules_by_suffix(parts, [""], flag=False)
    assert utils.get_z3_leaf_modules(parts) == []


def units(parts: nn.Module, classes: tuple[str, ...] = ()) -> list[str]:
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "leaf_module": {"classes": list(classes)},
        },
    }
    engine: Any = initialize(model=parts, config=config)[0]
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    actual = [n for n, p in engine.module.named_modules() if isinstance(p, FSDPModule)]
    for part in engine.module.modules():
        inside = [p for leaf in utils.get_z3_leaf_modules(engine.module) for p in leaf.parameters()]
        for parameter in part.parameters():
            assert utils.z3_leaf_parameter(parameter) == any(parameter is p for p in inside)
    engine.close()
    return actual


def test_stage3_gathers_marked_instances_as_units() -> None:
    parts = model()
    utils.set_z3_leaf_modules_by_name(parts, ["0.experts.0.up"])
    assert units(model()) == ["", "0", "2"]
    assert units(parts) == ["", "0", "0.experts.0.up", "2"]
    assert units(model(), (f"{__name__}.GatedExpert",)) == [
        "",
        "0",
        "0.experts.1",
        "2",
        "2.experts.1",
    ]
