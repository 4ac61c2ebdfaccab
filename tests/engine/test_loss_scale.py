"""The loss scaler, without torch."""

import pytest

from zerolab.config.engine.runtime import Fp16Config
from zerolab.errors import ConfigError
from zerotrial.engine.loss_scale import (
    DynamicLossScaler,
    LossScaleError,
    StaticLossScaler,
    make_scaler,
)


def scales(scaler: DynamicLossScaler, pattern: str) -> list[float]:
    """Scale after each update; ``o`` is an overflow."""
    values = []
    for step in pattern:
        scaler.update(step == "o")
        values.append(scaler.scale)
    return values


@pytest.mark.parametrize(
    ("options", "pattern", "expected"),
    [
        (
            {"hysteresis": 2, "loss_scale_window": 4},
            "ooo" + 12 * ".",
            [256, 128, 64, 64, 64, 64, 64, 128, 128, 128, 128, 256, 256, 256, 256],
        ),
        (
            {"hysteresis": 1, "loss_scale_window": 4},
            "o.o.o.o.",
            [128, 128, 64, 64, 32, 32, 16, 16],
        ),
        (
            {"hysteresis": 2, "loss_scale_window": 4, "consecutive_hysteresis": True},
            "o.o.o.o.",
            [256] * 8,
        ),
        ({"hysteresis": 3, "loss_scale_window": 100}, "oooo", [256, 256, 128, 64]),
        ({"hysteresis": 2, "loss_scale_window": 1}, "....", [256, 512, 1024, 2048]),
    ],
)
def test_dynamic_scale_matches_deepspeed(
    options: dict[str, object], pattern: str, expected: list[float]
) -> None:
    assert scales(DynamicLossScaler(8, **options), pattern) == expected


def test_first_growth_is_one_step_after_the_window() -> None:
    values = scales(DynamicLossScaler(4, loss_scale_window=10), 12 * ".")
    assert values == [16.0] * 10 + [32.0] * 2


def test_overflow_at_smallest_scale_is_an_error() -> None:
    scaler = DynamicLossScaler(8, loss_scale_window=1, hysteresis=2, min_loss_scale=16)
    assert scales(scaler, "ooooo") == [256, 128, 64, 32, 16]
    with pytest.raises(LossScaleError, match=r"min_loss_scale.*bf16"):
        scaler.update(True)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"hysteresis": 0}, "hysteresis"),
        ({"loss_scale_window": 0}, "loss_scale_window"),
        ({"min_loss_scale": 0}, "min_loss_scale"),
        ({"initial_scale_power": -1}, "initial_scale_power"),
    ],
)
def test_invalid_numbers_are_refused(options: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError, match=f"fp16.{key}"):
        DynamicLossScaler(**options)


def test_saved_scaler_resumes() -> None:
    first = DynamicLossScaler(8, 4, 2)
    scales(first, "oo..")
    second = DynamicLossScaler(16, 4, 2)
    second.load_state_dict(first.state_dict())
    assert scales(first, "....o.o.") == scales(second, "....o.o.")


def test_static_scale_and_no_scale() -> None:
    fixed = make_scaler(Fp16Config(enabled=True, loss_scale=128.0))
    fixed.update(True)
    assert fixed.scale == 128.0
    assert isinstance(make_scaler(Fp16Config()), StaticLossScaler)
    assert make_scaler(Fp16Config()).scale == 1.0
    assert make_scaler(Fp16Config(enabled=True)).scale == 2.0**16
