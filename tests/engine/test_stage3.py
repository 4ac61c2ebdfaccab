"""Stage 3 against a plain one-process loop; many cases in one spawn of ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine.ranks import run_on_ranks
from tests.engine.stage3_models import (
    Course,
    Language,
    decay_groups,
    make_batches,
    train_plainly,
)
from zerotrial.engine import initialize

STEPS = 20
LEARNING_RATE = 2e-3
TOLERANCES = {"fp32": 1e-6, "bf16": 2e-3, "fp16": 5e-3}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return build()

    return make


def world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=LEARNING_RATE)


def train(
    build: Callable[[], nn.Module],
    batches: list[list[list[Any]]],
    config: dict[str, Any],
    optimizer: Any = adamw,
) -> Course:
    """Train with the engine; losses are averaged over the ranks."""
    rank, ranks = world()
    model = build()
    engine, *_ = initialize(
        model=model,
        model_parameters=decay_groups(model),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": len(batches[0]),
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            **config,
        },
    )
    losses, norms = [], []
    for step in batches:
        total = torch.zeros(1, dtype=torch.float64)
        for micro in step:
            loss = engine(*micro[rank])
            total += loss.detach().double() / len(step)
            engine.backward(loss)
            engine.step()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(total.item() / ranks)
        norms.append(engine.get_global_grad_norm())
    weights = {name: tensor.clone() for name, tensor in engine.stage.full_weights()}
    engine.close()
    return Course(losses, norms, weights)


def differences(found: Course, wanted: Course, tolerance: float) -> list[str]:
    problems = []
    for name in ("losses", "norms"):
        for step, (a, b) in enumerate(
            zip(getattr(found, name), getattr(wanted, name), strict=True)
        ):
            # A norm is not averaged over a batch: its rounding is larger than a loss's.
            allowed = tolerance * (1 if name == "losses" else 20)
            if not abs(a - b) <= allowed * abs(b):
                problems.append(f"{name} at step {step}: {a} instead of {b}")
    for name, weight in found.weights.items():
        far = (weight - wanted.weights[name]).abs().max().item()
        if far > 20 * tolerance:
            problems.append(f"{name} is {far} off")
    return problems


def parity_cases() -> dict[str, list[str]]:
    """Run on every rank; problems by case."""
    _, ranks = world()
    found: dict[str, list[str]] = {}
    build = seeded(Language)
    for precision, tolerance in TOLERANCES.items():
        for micro, clip in ((1, 0.0), (2, 0.3)):
            steps = STEPS if precision != "fp16" else 8
            batches = make_batches(steps, micro, ranks)
            config: dict[str, Any] = {"gradient_clipping": clip}
            if precision != "fp32":
                config[precision] = {"enabled": True}
            if precision == "fp16":
                config["fp16"]["initial_scale_power"] = 10
            scale = 1024.0 if precision == "fp16" else 1.0
            wanted = train_plainly(
                build, batches, adamw, clip=clip, dtype=DTYPES[precision], scale=scale
            )
            case = f"{precision}, {micro} micro-batches, clipping {clip}"
            found[case] = differences(train(build, batches, config), wanted, tolerance)
    return found


def test_one_process_trains_as_a_plain_loop() -> None:
    assert {case: bad for case, bad in parity_cases().items() if bad} == {}


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_as_one_process(ranks: int) -> None:
    for found in run_on_ranks(parity_cases, ranks):
        assert {case: bad for case, bad in found.items() if bad} == {}
