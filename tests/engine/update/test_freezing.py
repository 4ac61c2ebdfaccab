"""A parameter that is frozen during training stays, as with plain torch, until it is unfrozen."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerotrial
from tests.engine.ranks import run_on_ranks
from zerotrial.engine import Engine
from zerotrial.extensions.optimizers.lamb import Lamb

SAMPLES = 8
PLAN = {2: (["1"], False), 4: (["0", "scale"], False), 5: (["1"], True), 7: (["0", "scale"], True)}
"""Before which step is what frozen (False) or unfrozen (True)."""
STEPS = 9


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(7, 7) for i in range(3)})
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x)) + x
        return (x * self.scale).square().mean()


def inputs(step: int) -> Tensor:
    return torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(step))


def set_required(model: nn.Module, step: int) -> None:
    for name in PLAN.get(step, ([], True))[0]:
        part = model.scale if name == "scale" else model.layers[name]
        part.requires_grad_(PLAN[step][1])


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, weight_decay=0.1, momentum=0.9),
    "Lamb": lambda p: Lamb(p, lr=0.02, weight_decay=0.1),
}
OPTIONS = {"SGD": {"momentum": 0.9}}


@functools.cache
def plain(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    norms = []
    for step in range(STEPS):
        set_required(model, step)
        optimizer.zero_grad()
        for half in inputs(step).chunk(2):
            (model(half) / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def make_engine(stage: int, kind: str, zero: dict[str, Any], **more: Any) -> Engine:
    torch.manual_seed(0)
    params = {"lr": 0.02, "weight_decay": 0.1, **OPTIONS.get(kind, {})}
    return zerotrial.initialize(
        model=Model(),
        config={
            "train_batch_size": SAMPLES,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": kind, "params": params},
            "zero_optimization": {"stage": stage, **zero},
            **more,
        },
    )[0]


def train(engine: Engine, steps: range) -> list[float]:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    norms: list[float] = []
    before = weights(engine)
    for step in steps:
        set_required(engine.module, step)
        for half in inputs(step).chunk(2):
            engine.backward(engine(half.chunk(ranks)[rank]))
            result = engine.step()
        norms.append(result.grad_norm or 0.0)
        after = weights(engine)
        for name, parameter in engine.module.named_parameters():
            same = torch.equal(after[name], before[name])
            assert same != parameter.requires_grad, (step, name)
        before = after
    return norms


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: engine.full(name) for name, _ in engine.module.named_parameters()}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "AdamW": ("AdamW", {}, {}),
    "SGD": ("SGD", {"reduce_bucket_size": 60}, {}),
    "Lamb": ("Lamb", {}, {}),
    "files": ("AdamW", {"offload_optimizer": {"device": "nvme"}}, {}),
    "bf16": ("AdamW", {}, {"bf16": {"enabled": True}}),
}


STAGES = {"AdamW": (0, 1, 2, 3), "SGD": (0, 2), "Lamb": (1, 3), "files": (1, 3), "bf16": (0, 3)}
"""Of the cases on several ranks; one rank runs each at all stages."""


def every_case(directory: str, names: Sequence[str]) -> dict[Any, Any]:
    results = {}
    for stage in (0, 1, 2, 3):
        for name in names:
            if dist.is_initialized() and stage not in STAGES[name]:
                continue
            kind, zero, more = CASES[name]
            options = {
                k: {**v, "nvme_path": directory} if isinstance(v, dict) else v
                for k, v in zero.items()
            }
            if name == "files" and stage == 0:
                continue
            engine = make_engine(stage, kind, options, **more)
            norms = train(engine, range(STEPS))
            results[stage, name] = norms, weights(engine)
            engine.close()
    return results


@pytest.mark.parametrize(
    ("ranks", "names"),
    [(1, [*CASES]), (2, [*CASES]), pytest.param(4, ["AdamW"], marks=pytest.mark.soak)],
)
def test_frozen_parameters_stay_as_in_plain_torch(
    ranks: int, names: list[str], tmp_path: Path
) -> None:
    arguments = str(tmp_path), names
    rank_results = (
        run_on_ranks(every_case, ranks, *arguments) if ranks > 1 else [every_case(*arguments)]
    )
    for (stage, name), (norms, weights) in (item for a in rank_results for item in a.items()):
        if name == "bf16":
            continue  # frozen and trained parameters are checked in each step
        expected_norms, expected = plain(CASES[name][0])
        assert norms == pytest.approx(expected_norms, rel=1e-4), (stage, name)
        for key, value in expected.items():
            gap = float((weights[key] - value).abs().max())
            assert gap < 2e-5, (stage, name, key, gap)


def save_frozen(directory: str) -> None:
    for stage, kind in ((1, "AdamW"), (3, "AdamW"), (3, "Lamb")):
        engine = make_engine(stage, kind, {})
        train(engine, range(6))
        engine.save_checkpoint(directory, tag=f"{stage}{kind}")
        engine.close()


def resume_frozen(directory: str) -> dict[Any, Any]:
    counts = {}
    for stage, tag in ((0, "3AdamW"), (2, "1AdamW"), (3, "1AdamW"), (2, "3Lamb"), (3, "3AdamW")):
        engine = make_engine(stage, tag[1:], {})
        engine.load_checkpoint(directory, tag=tag)
        set_required(engine.module, 4)  # frozen parameters are not part of a checkpoint
        train(engine, range(6, STEPS))
        counts[stage, tag] = weights(engine)
        engine.close()
    return counts


def test_step_counts_of_frozen_parameters_resume(tmp_path: Path) -> None:
    run_on_ranks(save_frozen, 2, str(tmp_path))
    rank_results = [resume_frozen(str(tmp_path)), *run_on_ranks(resume_frozen, 4, str(tmp_path))]
    for (stage, tag), counts in (
        item for rank_result in rank_results for item in rank_result.items()
    ):
        for key, value in plain(tag[1:])[1].items():
            gap = float((counts[key] - value).abs().max())
            assert gap < 2e-5, (stage, tag, key, gap)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradient_before_freezing_counts(stage: int) -> None:
    """Plain torch uses an existing gradient even if ``requires_grad`` is false at the step."""
    engine = make_engine(stage, "SGD", {}, gradient_accumulation_steps=1)
    before = engine.full("layers.0.weight")
    engine.backward(engine(inputs(0)))
    engine.module.requires_grad_(requires_grad=False)
    engine.step()
    assert not torch.equal(before, engine.full("layers.0.weight"))
    engine.close()
