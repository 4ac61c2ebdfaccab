"""Optimizers of our own against their formulas, and how any optimizer is taken over."""

import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrial
from tests.engine.models import needs_muon
from zerolab.errors import ConfigError
from zerotrial.engine.update.factory import UncorrectedAdam, UncorrectedAdamW
from zerotrial.extensions.optimizers.lamb import Lamb
from zerotrial.extensions.optimizers.lion import Lion
from zerotrial.extensions.optimizers.muon import MuonWithAdamW

GRADIENTS = [torch.tensor([0.5, -2.0, 0.0]), torch.tensor([-1.0, 1.0, 0.25])]


def stepped(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[float]:
    for gradient in GRADIENTS:
        parameter.grad = gradient.view_as(parameter).clone()
        optimizer.step()
    return parameter.detach().flatten().tolist()


def test_lion_moves_by_the_sign_of_momentum() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    actual = stepped(Lion([parameter], lr=0.1, betas=(0.9, 0.8), weight_decay=0.5), parameter)
    weights, momentum = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
    for gradient in GRADIENTS:
        direction = torch.sign(0.9 * momentum + 0.1 * gradient)
        weights = weights * (1 - 0.1 * 0.5) - 0.1 * direction
        momentum = 0.8 * momentum + 0.2 * gradient
    assert actual == pytest.approx(weights.tolist())


OPTIONS = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}


def uncorrected_adam(
    weights: torch.Tensor, gradients: list[torch.Tensor], *, decoupled: bool
) -> torch.Tensor:
    """Adam by hand, without the division by ``1 - beta ** step``."""
    lr, (beta1, beta2), eps, decay = OPTIONS.values()
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)
    for values in gradients:
        gradient = values.clone()
        if decoupled:
            weights = weights * (1 - lr * decay)
        else:
            gradient += decay * weights
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        weights = weights - lr * first / (second.sqrt() + eps)
    return weights


def test_torch_collects_adam_steps_last() -> None:
    """Where UncorrectedAdam gives the kernel others."""
    for cls in (torch.optim.Adam, torch.optim.AdamW):
        assert list(inspect.signature(cls._init_group).parameters)[-1] == "state_steps"


@pytest.mark.parametrize("kernel", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("decoupled", [True, False])
def test_uncorrected_adam_follows_its_formula(kernel: dict[str, bool], decoupled: bool) -> None:
    cls = UncorrectedAdamW if decoupled else UncorrectedAdam
    parameter = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    optimizer = cls([parameter], **OPTIONS, **kernel)
    weights = stepped(optimizer, parameter)
    start = torch.tensor([1.0, 2.0, 3.0])
    expected = uncorrected_adam(start, GRADIENTS, decoupled=decoupled)
    assert weights == pytest.approx(expected.tolist())
    assert optimizer.state[parameter]["step"].item() == 2.0


@pytest.mark.parametrize(
    ("stage", "device"),
    [(0, "none"), *itertools.product([1, 2, 3], ["none", "cpu", "nvme"])],
)
@pytest.mark.parametrize("mode", [True, False])
def test_bias_correction_false_follows_the_formula(
    stage: int, device: str, mode: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    plain.load_state_dict(model.state_dict())
    params = {**OPTIONS, "betas": list(OPTIONS["betas"]), "bias_correction": False}
    offload = {"device": device, "nvme_path": str(tmp_path)}
    engine, *_ = zerotrial.initialize(
        model=model,
        config={
            "train_batch_size": 2,
            "optimizer": {"type": "Adam", "params": {**params, "adam_w_mode": mode}},
            "zero_optimization": {"stage": stage, "offload_optimizer": offload},
        },
    )
    batches = [torch.randn(2, 3) for _ in range(4)]
    gradients: list[torch.Tensor] = []
    start = expected = plain.weight.detach().clone()
    for batch in batches:
        with torch.no_grad():
            plain.weight.copy_(expected)
        plain.weight.grad = None
        plain(batch).pow(2).mean().backward()
        gradients.append(plain.weight.grad.clone())
        expected = uncorrected_adam(start, gradients, decoupled=mode)
        engine.backward(engine(batch).pow(2).mean())
        engine.step()
    ((_, weight),) = engine.stage.full_weights()
    torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)
    assert engine.stage.updater.scalars() == {"group0.step": 4.0}
    engine.close()


def test_lamb_scales_the_step_to_the_weights() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    actual = stepped(Lamb([parameter], lr=0.1, weight_decay=0.1, eps=1e-6), parameter)
    weights = torch.tensor([1.0, 2.0, 3.0])
    first, second = torch.zeros(3), torch.zeros(3)
    for count, gradient in enumerate(GRADIENTS, start=1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        ratio = (first / (1 - 0.9**count)) / ((second / (1 - 0.999**count)).sqrt() + 1e-6)
        update = ratio + 0.1 * weights
        trust = min(max(float(weights.norm() / update.norm()), 0.01), 10.0)
        weights = weights - 0.1 * trust * update
    assert actual == pytest.approx(weights.tolist(), rel=1e-5)


@needs_muon
@pytest.mark.parametrize("rates", [{"lr": 0.1}, {"lr": 1e-3, "muon_lr": 0.1}])
def test_muon_updates_matrices_adamw_the_others(rates: dict[str, float]) -> None:
    torch.manual_seed(0)
    start = torch.randn(4, 3)
    matrix, vector = nn.Parameter(start.clone()), nn.Parameter(torch.ones(3))
    combined = MuonWithAdamW([matrix, vector], weight_decay=0.1, adam_lr=0.01, **rates)
    plain_matrix, plain_vector = nn.Parameter(start.clone()), nn.Parameter(torch.ones(3))
    muon = torch.optim.Muon([plain_matrix], lr=0.1, weight_decay=0.1)
    adam = torch.optim.AdamW([plain_vector], lr=0.01, weight_decay=0.1)
    for _ in range(3):
        gradient = torch.randn(4, 3)
        matrix.grad, plain_matrix.grad = gradient.clone(), gradient.clone()
        vector.grad, plain_vector.grad = gradient[0].clone(), gradient[0].clone()
        for optimizer in (combined, muon, adam):
            optimizer.step()
    torch.testing.assert_close(matrix, plain_matrix)
    torch.testing.assert_close(vector, plain_vector)


class Signs(torch.optim.Optimizer):
    """User optimizer that depends on the shape of its parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.shapes: set[tuple[int, ...]] = set()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.shapes.add(tuple(parameter.shape))
                parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


def engine_with(optimizer: Any, model: nn.Module, **config: Any) -> Any:
    engine, *_ = zerotrial.initialize(
        model=model,
        optimizer=optimizer,
        config={"train_micro_batch_size_per_gpu": 2, **config},
    )
    return engine


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_user_optimizer_gets_full_parameters(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = Signs(model.parameters(), lr=0.5)
    engine = engine_with(optimizer, model, zero_optimization={"stage": stage})
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    assert optimizer.shapes == {(2, 3), (2,)}
    torch.testing.assert_close(model.weight.detach(), before - 0.5)
    assert engine.optimizer is optimizer


def test_callable_builds_optimizer_with_group_options() -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())

    def groups_of(module: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": [module.weight], "lr": 0.1, "weight_decay": 0.5},
            {"params": [module.bias], "lr": 0.01, "weight_decay": 0.0},
        ]

    engine = engine_with(lambda _: torch.optim.AdamW(groups_of(model)), model)
    reference = torch.optim.AdamW(groups_of(plain))
    for _ in range(3):
        batch = torch.randn(2, 3)
        engine.backward(engine(batch).pow(2).mean())
        engine.step()
        plain(batch).pow(2).mean().backward()
        reference.step()
        reference.zero_grad()
    torch.testing.assert_close(model.weight, plain.weight)
    torch.testing.assert_close(model.bias, plain.bias)
    assert engine.get_lr() == [0.1, 0.01]


def test_parameter_groups_with_configured_optimizer() -> None:
    model = nn.Linear(3, 2)
    engine, *_ = zerotrial.initialize(
        model=model,
        model_parameters=[
            {"params": [model.weight], "weight_decay": 0.3},
            {"params": [model.bias], "lr": 0.5},
        ],
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        },
    )
    groups = engine.optimizer.param_groups
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.1, 0.3), (0.5, 0.0)]


@pytest.mark.parametrize(
    ("block", "cls", "fused"),
    [
        ({"type": "Adam"}, torch.optim.AdamW, True),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, torch.optim.Adam, True),
        ({"type": "adamw", "params": {"torch_adam": True}}, torch.optim.AdamW, True),
        ({"type": "Adam", "params": {"bias_correction": False}}, UncorrectedAdamW, True),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, torch.optim.SGD, True),
        ({"type": "Adagrad"}, torch.optim.Adagrad, True),
        ({"type": "RMSprop"}, torch.optim.RMSprop, None),
        ({"type": "Lion"}, Lion, None),
        ({"type": "Lamb"}, Lamb, None),
        pytest.param({"type": "muon"}, MuonWithAdamW, None, marks=needs_muon),
    ],
)
def test_configured_name_becomes_optimizer(
    block: dict[str, Any], cls: type, fused: bool | None
) -> None:
    engine, optimizer, *_ = zerotrial.initialize(
        model=nn.Linear(3, 2), config={"train_batch_size": 2, "optimizer": block}
    )
    assert type(optimizer) is cls
    assert optimizer.param_groups[0].get("fused") is fused
    engine.backward(engine(torch.ones(2, 3)).sum())
    assert engine.step().updated


def test_stepped_optimizer_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="must not have stepped"):
        engine_with(optimizer, model)


def test_prepared_states_are_those_of_the_first_step() -> None:
    model = nn.Linear(3, 2)
    engine = engine_with(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    before = model.weight.detach().clone()
    engine.stage.updater.prepare_states()
    pieces = list(engine.stage.pieces())
    assert {name for piece in pieces for name in piece.tensors} == {
        "master",
        "exp_avg",
        "exp_avg_sq",
    }
    assert all(not piece.tensors["exp_avg"].any() for piece in pieces)
    assert engine.stage.updater.scalars() == {"group0.step": 0.0}
    assert torch.equal(model.weight, before)
    engine.stage.updater.set_scalars({"group0.step": 7.0})
    assert engine.stage.updater.scalars() == {"group0.step": 7.0}
