"""Units of modules that stage 3 gathers together."""

from collections.abc import Sequence

import pytest
from torch import nn

from tests.engine.pipelines import build
from zerolab.errors import ConfigError
from zerotrial.engine.module.units import Unit, plan_units


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)
        self.up = nn.Linear(width, 4 * width)


class Tied(nn.Module):
    """Language model with a tied head."""

    def __init__(self, blocks: int = 3, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, vocabulary, bias=False)
        self.head.weight = self.embed.weight


def names(units: Sequence[Unit]) -> list[str]:
    return [unit.name for unit in units]


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_repeated_blocks_are_units_and_the_root_is_last() -> None:
    model = Tied()
    units = plan_units(model)
    assert names(units) == ["blocks.0", "blocks.1", "blocks.2", ""]
    assert units[0].module is model.blocks[0]
    assert units[0].numel == numel(model.blocks[0])


def test_pipeline_layers_are_units_except_one_read_by_a_function() -> None:
    model = build(1)  # a tied embedding at both ends, which is large here
    assert names(plan_units(model, unit_numel=10)) == [*(f"layers.{n}" for n in range(1, 7)), ""]


def test_every_parameter_counts_in_exactly_one_unit() -> None:
    for model in (
        Tied(),
        nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
        nn.LSTM(4, 4),
        nn.Linear(3, 3),
    ):
        assert sum(unit.numel for unit in plan_units(model, unit_numel=10)) == numel(model)


def test_tied_owners_stay_in_the_root_unit_at_any_size() -> None:
    assert "embed" not in names(plan_units(Tied(vocabulary=1000), unit_numel=100))
    untied = Tied(vocabulary=1000)
    untied.head = nn.Linear(8, 1000)
    assert {"embed", "head"} <= set(names(plan_units(untied, unit_numel=100)))


def test_blocks_that_share_a_weight_are_gathered_together() -> None:
    model = Tied()
    model.blocks[0].up.weight = model.blocks[2].up.weight
    assert names(plan_units(model)) == ["blocks.1", ""]


def test_attention_and_recurrent_modules_have_no_inner_units() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "rnn": nn.LSTM(8, 8, 2)})
    assert names(plan_units(model, unit_numel=1)) == ["attention", "rnn", ""]


def test_single_large_modules_are_units_but_containers_are_not() -> None:
    model = nn.ModuleDict({"body": nn.ModuleList([nn.Linear(100, 100)]), "last": nn.Linear(2, 2)})
    assert names(plan_units(model, unit_numel=1000)) == ["body.0", ""]
    assert names(plan_units(model, unit_numel=100_000)) == [""]


def test_blocks_in_nested_containers_are_found() -> None:
    stages = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)) for _ in "ab"))
    assert names(plan_units(stages)) == ["0.0", "0.1", "1.0", "1.1", ""]


def test_user_selects_units_by_class_name_or_function() -> None:
    model = Tied()
    assert names(plan_units(model, wrap=["Linear"])) == [
        "blocks.0.up",
        "blocks.1.up",
        "blocks.2.up",
        "",
    ]
    assert names(plan_units(model, wrap=lambda m: [m.get_submodule("blocks.1")])) == [
        "blocks.1",
        "",
    ]


def test_unknown_class_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'Blok': not in the model, which has: Block"):
        plan_units(Tied(), wrap=["Blok"])
    with pytest.raises(ConfigError, match="must pick modules of the model"):
        plan_units(Tied(), wrap=lambda _: [nn.Linear(2, 2)])


def test_ignored_parameters_belong_to_no_unit() -> None:
    model = Tied()
    biases = [p for p in model.parameters() if p.dim() == 1]
    units = plan_units(model, ignored=biases)
    assert sum(unit.numel for unit in units) == numel(model) - sum(p.numel() for p in biases)


def test_leaf_class_is_gathered_with_everything_inside() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 4), nn.Linear(4, 4))
    units = plan_units(model, leaves=["TransformerEncoderLayer"], unit_numel=1)
    assert names(units) == ["0", "1", "2", ""]
    full = nn.Sequential(Tied(), nn.Linear(4, 4))
    assert names(plan_units(full, leaves=["Tied"])) == ["0", ""]
