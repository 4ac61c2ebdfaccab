"""Counting of floating-point operations, and the peak of a device."""

import pytest
import torch
from torch import nn

from zerolab.errors import ConfigError
from zerotrial.extensions.profiler.flops import (
    PEAK_VARIABLE,
    ForwardProfile,
    count_flops,
    format_profile,
    peak_flops,
)

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def numels(model: nn.Module) -> dict[str, int]:
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def test_linear_layer_flops() -> None:
    layer, x = nn.Linear(8, 16), torch.randn(5, 8, requires_grad=True)
    with count_flops() as so_far:
        out = layer(x)
        forward = so_far()
        out.sum().backward()
    assert forward == 2 * 5 * 8 * 16
    assert so_far() == 3 * forward


def test_attention_on_cpu_is_counted() -> None:
    q = torch.randn(2, 3, 7, 4, requires_grad=True)
    with count_flops() as so_far:
        out = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        forward = so_far()
        out.sum().backward()
    assert forward == 2 * (2 * 2 * 3 * 7 * 7 * 4)
    assert so_far() > 2 * forward


def test_modules_of_a_forward_are_counted_and_timed() -> None:
    model = Model()
    with ForwardProfile(model, numels(model)) as profile:
        model(torch.randn(4, 8))
    costs = {cost.name: cost for cost in profile.costs()}
    assert set(costs) == {"", "body", "body.0", "body.1", "body.2", "head"}
    assert costs["body.0"].flops == 2 * 4 * 8 * 32
    assert costs["body"].flops == 2 * costs["body.0"].flops
    assert costs[""].flops == profile.flops == costs["body"].flops + 2 * 4 * 8 * 2
    assert costs["body"].parameters == 8 * 32 + 32 + 32 * 8 + 8
    assert costs[""].seconds >= costs["body"].seconds > 0
    assert not model._forward_hooks


def test_profile_table_options() -> None:
    model = Model()
    with ForwardProfile(model, numels(model)) as profile:
        model(torch.randn(4, 8))
    costs = profile.costs()
    short = format_profile(costs, title="T", module_depth=1, top_modules=1, detailed=False)
    assert short.splitlines()[0] == "T"
    assert "depth 1: body (Sequential)" in short
    assert "head" not in short
    assert "depth 2" not in short
    full = format_profile(costs, title="T", module_depth=-1, top_modules=2, detailed=True)
    assert "depth 1: head (Linear)" in full
    assert "    body.2 (Linear)" in full


def test_peak_from_environment_or_none_on_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(PEAK_VARIABLE, raising=False)
    assert peak_flops(CPU, torch.bfloat16) is None
    monkeypatch.setenv(PEAK_VARIABLE, "1.5")
    assert peak_flops(CPU, torch.bfloat16) == 1.5e12
    monkeypatch.setenv(PEAK_VARIABLE, "fast")
    with pytest.raises(ConfigError, match="must be a positive number of TFLOP/s, got 'fast'"):
        peak_flops(CPU, torch.bfloat16)
