"""Schedules against formulas written here, step by step."""

import math

import pytest
import torch

from zerolab.errors import ConfigError
from zerotrial.engine import lr_schedules
from zerotrial.engine.lr_schedules import (
    LinearWarmupLR,
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)


def optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
    return torch.optim.AdamW(groups)


def run(schedule: Schedule, steps: int) -> list[float]:
    """Rate of the first group in each of the optimizer steps."""
    found = []
    for _ in range(steps):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step()
    return found


def warmup_share(it: int, steps: int, kind: str) -> float:
    if it >= steps:
        return 1.0
    return math.log(it + 1) / math.log(steps) if kind == "log" else it / steps


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_runs_two_steps_at_the_minimum_and_then_climbs(kind: str) -> None:
    found = run(WarmupLR(optimizer(0.5), 0.1, 0.9, 6, kind), 12)
    expected = [0.1] + [0.1 + 0.8 * warmup_share(it, 6, kind) for it in range(11)]
    assert found == pytest.approx(expected)
    assert found[0] == found[1] == pytest.approx(0.1)


def test_warmup_climbs_to_the_optimizers_own_rates_unless_told() -> None:
    schedule = WarmupLR(optimizer(0.5, 0.25), warmup_num_steps=4)
    for _ in range(6):
        schedule.step()
    assert schedule.get_last_lr() == [0.5, 0.25]
    assert schedule.get_lr() == [0.5, 0.25]


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_decay_falls_in_a_line_to_the_end(kind: str) -> None:
    found = run(WarmupDecayLR(optimizer(0.5), 20, 0.0, 0.01, 5, kind), 25)

    def share(it: int) -> float:
        return warmup_share(it, 5, kind) if it < 5 else max(0.0, (20 - it) / 15)

    assert found == pytest.approx([0.0] + [0.01 * share(it) for it in range(24)])
    assert found[-1] == 0.0


def test_warmup_decay_ignores_the_optimizers_rate_unless_told() -> None:
    schedule = WarmupDecayLR(optimizer(0.5), 100, warmup_num_steps=2)
    schedule.step(2)
    assert schedule.get_last_lr() == pytest.approx([0.001])


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_cosine_is_a_share_of_the_optimizers_rates(kind: str) -> None:
    schedule = WarmupCosineLR(optimizer(0.4), 20, 0.1, 5, 0.01, kind)

    def ratio(it: int) -> float:
        if it < 5:
            return 0.1 + 0.9 * warmup_share(it, 5, kind)
        done = min(1.0, (it - 5 + 1) / 15)
        return 0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2

    expected = [0.4 * ratio(0)] + [0.4 * ratio(it) for it in range(24)]
    assert run(schedule, 25) == pytest.approx(expected)


def test_one_cycle_goes_up_and_down_once_and_then_decays() -> None:
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


def test_one_cycle_can_climb_by_stairs() -> None:
    schedule = OneCycle(
        optimizer(0.1), 0.0, 1.0, cycle_first_step_size=8, cycle_first_stair_count=2
    )
    found = run(schedule, 9)[1:]
    assert found[:7] == pytest.approx([0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("stairs", [False, True])
def test_the_range_test_grows_by_a_rate_each_interval(stairs: bool) -> None:
    found = run(LRRangeTest(optimizer(1.0), 0.01, 5, 2.0, stairs), 20)

    def rate(it: int) -> float:
        interval = (it + 1) / 5
        return 0.01 * (1 + 2.0 * (math.floor(interval) if stairs else interval))

    assert found == pytest.approx([0.01] + [rate(it) for it in range(19)])


def test_the_corrected_warmup_wastes_no_step() -> None:
    found = run(LinearWarmupLR(optimizer(0.8), 0.0, 0.8, 4), 7)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8])
    assert run(LinearWarmupLR(optimizer(0.8), 0.4, 0.8, 4), 2) == pytest.approx([0.5, 0.6])


@pytest.mark.parametrize("name", sorted(lr_schedules.SCHEDULES))
def test_a_saved_schedule_goes_on_where_it_was(name: str) -> None:
    arguments = {
        "WarmupDecayLR": {"total_num_steps": 20, "warmup_num_steps": 5},
        "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 5},
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 6},
        "LRRangeTest": {"lr_range_test_step_size": 3},
    }.get(name, {"warmup_num_steps": 5})
    first = lr_schedules.SCHEDULES[name](optimizer(0.5), **arguments)
    run(first, 7)
    second = lr_schedules.SCHEDULES[name](optimizer(0.5), **arguments)
    second.load_state_dict(first.state_dict())
    first.step()
    second.step()
    assert run(first, 10) == run(second, 10)


def test_one_rate_for_each_group_or_one_for_all() -> None:
    schedule = WarmupLR(optimizer(0.5, 0.5), [0.0, 0.1], [1.0, 2.0], 2)
    schedule.step(5)
    assert schedule.get_last_lr() == [1.0, 2.0]
    with pytest.raises(ConfigError, match=r"warmup_max_lr.*2 parameter groups, got 3"):
        WarmupLR(optimizer(0.5, 0.5), 0.0, [1.0, 2.0, 3.0], 2)


@pytest.mark.parametrize("steps", [0, -3, 2.5, "auto", True])
def test_a_warmup_of_no_whole_number_of_steps_is_refused(steps: object) -> None:
    with pytest.raises(ConfigError, match="warmup_num_steps: must be a positive integer"):
        WarmupLR(optimizer(0.5), 0.0, 0.1, steps)
