"""Schedules against formulas written here, step by step."""

import inspect
import math
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch

from zerolab.config.engine import schedules
from zerolab.config.engine.reader import load_engine_config
from zerolab.errors import ConfigError
from zerolab.schema.section import PositiveInt, Section
from zerotrial.engine import initialize, lr_schedules
from zerotrial.engine.lr_schedules import (
    LinearWarmupLR,
    LRRangeTest,
    LRSchedule,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

ARGUMENTS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": 0.9, "warmup_num_steps": 5},
    "WarmupDecayLR": {"total_num_steps": 20, "warmup_num_steps": 5},
    "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 5},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 6},
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "LinearWarmupLR": {"warmup_max_lr": 0.9, "warmup_num_steps": 5},
}
"""Some for each schedule."""


def optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
    return torch.optim.AdamW(groups)


def run(schedule: LRSchedule, steps: int) -> list[float]:
    """Rate of the first group in each of the optimizer steps."""
    rates = []
    for _ in range(steps):
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step()
    return rates


def warmup_share(it: int, steps: int, kind: str) -> float:
    if it >= steps:
        return 1.0
    return math.log(it + 1) / math.log(steps) if kind == "log" else it / steps


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_starts_with_two_steps_at_minimum(kind: str) -> None:
    rates = run(WarmupLR(optimizer(0.5), 0.1, 0.9, 6, kind), 12)
    expected = [0.1] + [0.1 + 0.8 * warmup_share(it, 6, kind) for it in range(11)]
    assert rates == pytest.approx(expected)
    assert rates[0] == rates[1] == pytest.approx(0.1)


def test_no_warmup_is_one_of_two_steps() -> None:
    """As DeepSpeed reads what Hugging Face writes for it."""
    for schedule, total in ((WarmupLR, {}), (WarmupDecayLR, {"total_num_steps": 8})):
        none, two = (schedule(optimizer(0.5), warmup_num_steps=n, **total) for n in (0, 2))
        assert run(none, 8) == run(two, 8)


def test_warmup_defaults_to_optimizer_rates() -> None:
    schedule = WarmupLR(optimizer(0.5, 0.25), warmup_num_steps=4)
    for _ in range(6):
        schedule.step()
    assert schedule.get_last_lr() == [0.5, 0.25]
    assert schedule.get_lr() == [0.5, 0.25]


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_decay_is_linear(kind: str) -> None:
    rates = run(WarmupDecayLR(optimizer(0.5), 20, 0.0, 0.01, 5, kind), 25)

    def share(it: int) -> float:
        return warmup_share(it, 5, kind) if it < 5 else max(0.0, (20 - it) / 15)

    assert rates == pytest.approx([0.0] + [0.01 * share(it) for it in range(24)])
    assert rates[-1] == 0.0


def test_warmup_decay_ignores_optimizer_rate() -> None:
    schedule = WarmupDecayLR(optimizer(0.5), 100, warmup_num_steps=2)
    schedule.step(2)
    assert schedule.get_last_lr() == pytest.approx([0.001])


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_cosine_scales_optimizer_rates(kind: str) -> None:
    schedule = WarmupCosineLR(optimizer(0.4), 20, 0.1, 5, 0.01, kind)

    def ratio(it: int) -> float:
        if it < 5:
            return 0.1 + 0.9 * warmup_share(it, 5, kind)
        done = min(1.0, (it - 5 + 1) / 15)
        return 0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2

    # DeepSpeed's first optimizer step runs at 0, whatever the ratio; the second at the ratio.
    expected = [0.0] + [0.4 * ratio(it) for it in range(24)]
    assert run(schedule, 25) == pytest.approx(expected)
    assert expected[1] == pytest.approx(0.04)


def test_one_cycle_rises_falls_and_decays() -> None:
    schedule = OneCycle(
        optimizer(0.4),
        0.1,
        0.5,
        decay_lr_rate=0.5,
        cycle_first_step_size=4,
        cycle_second_step_size=6,
        decay_step_size=2,
        cycle_min_mom=0.8,
        cycle_max_mom=0.9,
        decay_mom_rate=0.1,
    )
    rates, momenta = [], []
    for _ in range(14):
        schedule.step()
        group = schedule.optimizer.param_groups[0]
        rates.append(group["lr"])
        momenta.append(group["betas"])
        assert schedule.get_mom() == [group["betas"]]

    def height(it: int) -> float:
        at = (it + 1) % 10
        return at / 4 if at <= 4 else (10 - at) / 6

    for it in range(14):
        if it < 10:
            rate, momentum = 0.1 + 0.4 * height(it), 0.9 - 0.1 * height(it)
        else:
            intervals = (it - 10 + 1) / 2
            rate, momentum = 0.1 / (1 + 0.5 * intervals), 0.9 * (1 + 0.1 * intervals)
        assert rates[it] == pytest.approx(rate), it
        assert momenta[it] == (pytest.approx(momentum), 0.99), it


def test_one_cycle_momentum_without_betas() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1))]
    schedule = OneCycle(torch.optim.SGD(parameters, lr=0.1, momentum=0.5), 0.1, 0.5)
    schedule.step()
    assert schedule.get_mom() == [schedule.optimizer.param_groups[0]["momentum"]]
    still = OneCycle(torch.optim.SGD(parameters, lr=0.1), 0.1, 0.5, cycle_momentum=False)
    assert still.get_mom() is None


def test_one_cycle_with_stairs() -> None:
    schedule = OneCycle(
        optimizer(0.1), 0.0, 1.0, cycle_first_step_size=8, cycle_first_stair_count=2
    )
    rates = run(schedule, 9)[1:]
    assert rates[:7] == pytest.approx([0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5])


@pytest.mark.parametrize(
    ("first", "second", "stairs"),
    [(10, 10, (10, 10)), (10, 21, (10, 7)), (7, 3, (3, 2)), (2000, 2000, (5, 5)), (6, 9, (4, 0))],
)
def test_one_cycle_stair_starts_on_its_step(
    first: int, second: int, stairs: tuple[int, int]
) -> None:
    """Against exact fractions: a float rounds down a stair at its start."""
    schedule = OneCycle(
        optimizer(0.1),
        0.001,
        0.01,
        cycle_first_step_size=first,
        cycle_second_step_size=second,
        cycle_first_stair_count=stairs[0],
        cycle_second_stair_count=stairs[1],
    )

    def height(it: int) -> Fraction:
        at = (it + 1) % (first + second)
        up = at <= first
        climbed = Fraction(at, first) if up else Fraction(first + second - at, second)
        count = stairs[0] if up else stairs[1]
        return Fraction(math.floor(climbed * count), count) if count else climbed

    expected = [0.001 + 0.009 * float(height(it)) for it in range(first + second)]
    assert [schedule.rates(it)[0] for it in range(first + second)] == pytest.approx(expected)
    assert max(expected) == expected[first - 1] == pytest.approx(0.01)


@pytest.mark.parametrize("stairs", [False, True])
def test_range_test_grows_by_interval(stairs: bool) -> None:
    rates = run(LRRangeTest(optimizer(1.0), 0.01, 5, 2.0, stairs), 20)

    def rate(it: int) -> float:
        interval = (it + 1) / 5
        return 0.01 * (1 + 2.0 * (math.floor(interval) if stairs else interval))

    assert rates == pytest.approx([0.01] + [rate(it) for it in range(19)])


def test_linear_warmup_wastes_no_step() -> None:
    rates = run(LinearWarmupLR(optimizer(0.8), 0.0, 0.8, 4), 7)
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8])
    assert run(LinearWarmupLR(optimizer(0.8), 0.4, 0.8, 4), 2) == pytest.approx([0.5, 0.6])


@pytest.mark.parametrize("name", sorted(lr_schedules.SCHEDULES))
def test_saved_schedule_resumes(name: str) -> None:
    arguments = ARGUMENTS[name]
    first = lr_schedules.SCHEDULES[name](optimizer(0.5), **arguments)
    run(first, 7)
    second = lr_schedules.SCHEDULES[name](optimizer(0.5), **arguments)
    second.load_state_dict(first.state_dict())
    first.step()
    second.step()
    assert run(first, 10) == run(second, 10)


def test_one_rate_per_group_or_for_all() -> None:
    schedule = WarmupLR(optimizer(0.5, 0.5), [0.0, 0.1], [1.0, 2.0], 2)
    schedule.step(5)
    assert schedule.get_last_lr() == [1.0, 2.0]
    with pytest.raises(ConfigError, match=r"warmup_max_lr.*2 parameter groups, got 3"):
        WarmupLR(optimizer(0.5, 0.5), 0.0, [1.0, 2.0, 3.0], 2)


@pytest.mark.parametrize("name", sorted(lr_schedules.SCHEDULES))
def test_tensor_rate_stays_the_same_tensor(name: str) -> None:
    plain, tensors = optimizer(0.5), optimizer(0.5)
    rate = torch.tensor(0.5, dtype=torch.float64)
    tensors.param_groups[0]["lr"] = rate
    expected = lr_schedules.SCHEDULES[name](plain, **ARGUMENTS[name])
    schedule = lr_schedules.SCHEDULES[name](tensors, **ARGUMENTS[name])
    for _ in range(12):
        assert tensors.param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(plain.param_groups[0]["lr"])
        schedule.step()
        expected.step()


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": -3}),
    ("WarmupLR", {"warmup_num_steps": 2.5}),
    ("WarmupLR", {"warmup_num_steps": True}),
    ("WarmupLR", {"warmup_type": "cubic"}),
    ("WarmupLR", {"warmup_max_lr": -1.0}),
    ("LinearWarmupLR", {"warmup_num_steps": 0}),
    ("WarmupDecayLR", {"total_num_steps": 0}),
    ("WarmupCosineLR", {"warmup_num_steps": -5}),
    ("WarmupCosineLR", {"cos_min_ratio": -0.1}),
    ("OneCycle", {"cycle_first_step_size": 0, "cycle_second_step_size": 100}),
    ("OneCycle", {"cycle_first_step_size": -1}),
    ("OneCycle", {"cycle_first_stair_count": -1}),
    ("OneCycle", {"decay_step_size": -1}),
    ("LRRangeTest", {"lr_range_test_step_size": 0}),
    ("LRRangeTest", {"lr_range_test_step_rate": 0.0}),
]


@pytest.mark.parametrize(("name", "broken"), BROKEN)
def test_schedule_in_code_has_the_rules_of_the_file(name: str, broken: dict[str, Any]) -> None:
    arguments = ARGUMENTS[name] | broken
    with pytest.raises(ConfigError) as in_code:
        lr_schedules.SCHEDULES[name](optimizer(0.5), **arguments)
    block = {"scheduler": {"type": name, "params": arguments}}
    with pytest.raises(ConfigError) as in_file:
        load_engine_config({"train_batch_size": 8, **block})
    assert [f"scheduler.params.{line}" for line in in_code.value.problems] == in_file.value.problems


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupCosineLR", "WarmupDecayLR"])
def test_none_is_no_number_of_steps_in_code(name: str) -> None:
    arguments = ARGUMENTS[name] | {"warmup_num_steps": None}  # null in a file: the default
    with pytest.raises(ConfigError, match="warmup_num_steps: must be a whole number"):
        lr_schedules.SCHEDULES[name](optimizer(0.5), **arguments)


def test_whole_number_as_float() -> None:
    schedule = LinearWarmupLR(optimizer(0.8), 0.0, 0.8, 4.0)
    assert run(schedule, 4) == pytest.approx([0.2, 0.4, 0.6, 0.8])


class ToyParams(Section):
    """Arguments of Toy."""

    halve_every: PositiveInt = 2


class Toy(LRSchedule):
    """All that a new schedule needs."""

    section = ToyParams
    given: ToyParams

    def prepare(self) -> None:
        self._base = self.get_last_lr()

    def rates(self, it: int) -> list[float]:
        return [rate / 2 ** ((it + 1) // self.given.halve_every) for rate in self._base]


@pytest.fixture
def toy() -> Iterator[None]:
    lr_schedules.register(Toy)
    yield
    for table in (lr_schedules.SCHEDULES, schedules.SCHEDULES):
        del table["Toy"]


@pytest.mark.usefixtures("toy")
def test_new_schedule_is_one_class_and_one_line() -> None:
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.8}},
        "scheduler": {"type": "toy", "params": {"halve_every": 3}},
    }
    engine, *_ = initialize(model=torch.nn.Linear(2, 1), config=config)
    rates = []
    for _ in range(7):
        rates += engine.get_lr()
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    engine.close()
    assert rates == pytest.approx([0.8, 0.8, 0.8, 0.4, 0.4, 0.4, 0.2])
    config["scheduler"] = {"type": "Toy", "params": {"halve_every": 0}}
    with pytest.raises(ConfigError, match=r"scheduler.params.halve_every: .* greater than 0"):
        load_engine_config(config)


def test_schedules_are_checked_without_torch() -> None:
    """The tables agree before a schedule is registered, as ``zerolab config check`` sees them."""
    code = "import zerolab.config.engine.schedules as s; print(*sorted(s.SCHEDULES))"
    names = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert names.split() == sorted(lr_schedules.SCHEDULES)


def test_schedule_arguments_are_its_section_fields() -> None:
    shown = inspect.signature(WarmupDecayLR).parameters
    assert list(shown) == ["optimizer", *WarmupDecayLR.section.model_fields]
    assert shown["total_num_steps"].default is inspect.Parameter.empty
    assert shown["warmup_max_lr"].default == WarmupDecayLR(optimizer(1.0), 9).given.warmup_max_lr
    with pytest.raises(TypeError, match="total_num_steps"):
        WarmupDecayLR(optimizer(1.0))
    with pytest.raises(TypeError, match="'warmup_steps'"):
        WarmupLR(optimizer(1.0), warmup_steps=3)


def test_one_cycle_momentum_of_each_group() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [parameter]} for parameter in parameters]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
    schedule = OneCycle(
        optimizer, 0.1, 0.5, cycle_first_step_size=4,
        cycle_min_mom=[0.8, 0.6], cycle_max_mom=(0.9, 0.7), decay_step_size=2, decay_mom_rate=0.1,
    )  # fmt: skip
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.7]
    for _ in range(4):
        optimizer.step()
        schedule.step()
    assert [group["momentum"] for group in optimizer.param_groups] == pytest.approx([0.8, 0.6])
    assert schedule.get_mom() == pytest.approx([0.8, 0.6])
    with pytest.raises(ConfigError, match="cycle_min_mom"):
        OneCycle(optimizer, 0.1, 0.5, cycle_min_mom=[0.1, 0.2, 0.3])
