"""DeepSpeed's optimizer classes in the replacement."""

from typing import Any

import pytest
import torch
from torch import nn

from zerolab.errors import ConfigError
from zerotrial.engine.update.factory import UncorrectedAdam, UncorrectedAdamW, UserOptimizer
from zerotrial.extensions.deepspeed_api.initialize import initialize
from zerotrial.extensions.deepspeed_api.names import ops
from zerotrial.extensions.optimizers.lamb import Lamb
from zerotrial.extensions.optimizers.lion import Lion

pytestmark = pytest.mark.processes

BETAS = (0.8, 0.9)

CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any, dict[str, Any]]] = [
    # class, positional arguments in DeepSpeed's order, named ones, the same in plain torch
    (
        ops.FusedAdam,
        (0.1, True, BETAS, 1e-6, True, 0.3, False, False),
        {},
        torch.optim.AdamW,
        {"lr": 0.1, "betas": BETAS, "eps": 1e-6, "weight_decay": 0.3},
    ),
    (
        ops.FusedAdam,
        (0.1, True, BETAS, 1e-6, False, 0.3),
        {"amsgrad": True},
        torch.optim.Adam,
        {"lr": 0.1, "betas": BETAS, "eps": 1e-6, "weight_decay": 0.3, "amsgrad": True},
    ),
    (
        ops.DeepSpeedCPUAdam,
        (0.1, False, BETAS, 1e-6, 0.3, False, True, False),
        {},
        UncorrectedAdamW,
        {"lr": 0.1, "betas": BETAS, "eps": 1e-6, "weight_decay": 0.3},
    ),
    (
        ops.DeepSpeedCPUAdam,
        (0.1,),
        {"adamw_mode": False, "weight_decay": 0.3, "bias_correction": False},
        UncorrectedAdam,
        {"lr": 0.1, "weight_decay": 0.3},
    ),
    (ops.DeepSpeedCPUAdam, (), {}, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0}),
    (
        ops.DeepSpeedCPUAdagrad,
        (0.1, 1e-6, 0.3),
        {"amsgrad": False, "fp32_optimizer_states": False},
        torch.optim.Adagrad,
        {"lr": 0.1, "eps": 1e-6, "weight_decay": 0.3},
    ),
    (
        ops.DeepSpeedCPULion,
        (0.1, BETAS, 0.3),
        {"fp32_optimizer_states": False},
        Lion,
        {"lr": 0.1, "betas": BETAS, "weight_decay": 0.3},
    ),
    (
        ops.FusedLion,
        (),
        {"set_grad_none": False},
        Lion,
        {"lr": 1e-3, "betas": (0.9, 0.999)},
    ),
    (
        ops.FusedLamb,
        (0.1, False, BETAS, 1e-6, True, 0.3, 0.0, 5.0, 0.1),
        {},
        Lamb,
        {
            "lr": 0.1,
            "betas": BETAS,
            "eps": 1e-6,
            "weight_decay": 0.3,
            "bias_correction": False,
            "max_coeff": 5.0,
            "min_coeff": 0.1,
            "eps_inside_sqrt": True,
        },
    ),
]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.mark.parametrize(("cls", "values", "named", "plain", "options"), CASES)
def test_optimizer_takes_deepspeed_arguments(
    cls: Any, values: tuple[Any, ...], named: dict[str, Any], plain: Any, options: dict[str, Any]
) -> None:
    model, other = linear(), linear()
    optimizer = cls(model.parameters(), *values, **named)
    assert isinstance(optimizer, cls)
    assert isinstance(optimizer, torch.optim.Optimizer)
    expected = train(other, plain(other.parameters(), **options))
    for value, reference in zip(train(model, optimizer), expected, strict=True):
        torch.testing.assert_close(value, reference)


def test_optimizer_classes_are_separate() -> None:
    weight = [nn.Parameter(torch.ones(2))]
    assert not isinstance(ops.FusedAdam(weight), ops.DeepSpeedCPUAdam)
    assert not isinstance(ops.DeepSpeedCPUAdam(weight), ops.FusedAdam)
    assert not isinstance(ops.FusedLion(weight), ops.DeepSpeedCPULion)
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentum'"):
        ops.DeepSpeedCPUAdam(weight, momentum=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"max_grad_norm: must be 0.*\n.*amsgrad"):
        ops.FusedLamb(weight, max_grad_norm=1.0, amsgrad=True)


class Renamed(ops.FusedAdam):
    """Changes nothing but a default."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, bias_correction=False, weight_decay=0.2)


class Layerwise(ops.DeepSpeedCPUAdam):
    """Replaces the update by one that needs the whole parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (parameter.grad.norm() + 1e-6))


def test_subclass_with_its_own_step_gets_full_parameters() -> None:
    weight = [nn.Parameter(torch.ones(2))]
    assert UserOptimizer(Renamed(weight)).elementwise
    assert not UserOptimizer(Layerwise(weight)).elementwise
    assert UserOptimizer(ops.DeepSpeedCPUAdagrad(weight)).elementwise
    assert not UserOptimizer(ops.FusedLamb(weight)).elementwise


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "cls", [Renamed, Layerwise, ops.DeepSpeedCPUAdagrad, ops.DeepSpeedCPULion, ops.FusedLamb]
)
def test_engine_trains_and_resumes_with_the_class(cls: Any, stage: int, tmp_path: Any) -> None:
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
    }

    def build() -> Any:
        model = linear()
        return initialize(model=model, optimizer=cls(model.parameters(), lr=0.1), config=config)[0]

    def step(engine: Any, seed: int) -> None:
        torch.manual_seed(seed)
        engine.backward(engine(torch.randn(4, 3)).square().mean())
        engine.step()

    other = linear()
    plain = cls(other.parameters(), lr=0.1)
    engine = build()
    for seed in range(4):
        if seed == 2:
            engine.save_checkpoint(tmp_path)
            engine.close()
            engine = build()
            engine.load_checkpoint(tmp_path)
        step(engine, seed)
        torch.manual_seed(seed)
        plain.zero_grad()
        other(torch.randn(4, 3)).square().mean().backward()
        plain.step()
    for name, value in other.named_parameters():
        torch.testing.assert_close(engine.full(name), value.detach(), rtol=1e-5, atol=1e-6)
    engine.close()
