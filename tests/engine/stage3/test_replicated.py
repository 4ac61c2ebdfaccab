"""Scalars and empty parameters at stage 3, against plain torch in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerotrial
from tests.engine.ranks import run_on_ranks
from zerotrial.engine import Engine

SAMPLES, STEPS = 8, 4


class Contrastive(nn.Module):
    """Like CLIP: two towers, a temperature, a tied scalar, a frozen one, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 5), nn.Linear(6, 5)
        self.logit_scale = nn.Parameter(torch.tensor(1.3))
        self.gate = nn.Module()
        self.gate.alpha = nn.Parameter(torch.tensor(0.7))
        self.gate.beta = self.gate.alpha
        self.offset = nn.Parameter(torch.tensor(0.25), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        one = nn.functional.normalize(self.image(x).float(), dim=1)
        two = nn.functional.normalize(self.text(x).float(), dim=1)
        similar = self.logit_scale.exp() * (one * two).sum(1) * self.gate.alpha
        return (similar + self.gate.beta - self.offset + self.empty.sum()).square().mean()


class Scalars(nn.Module):
    """No parameter has a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.tensor(v)) for v in (0.5, -1.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift).square().mean()


def inputs(step: int) -> Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(step))


def here() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def make_engine(
    stage: int,
    kind: str = "AdamW",
    model: type[nn.Module] = Contrastive,
    zero: dict[str, Any] | None = None,
    **more: Any,
) -> Engine:
    torch.manual_seed(0)
    weight_decay = {"weight_decay": 0.1}
    return zerotrial.initialize(
        model=model(),
        config={
            "train_batch_size": SAMPLES,
            "optimizer": {"type": kind, "params": {"lr": 0.05, **weight_decay}},
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": stage, **(zero or {})},
            **more,
        },
    )[0]


def train(engine: Engine, steps: range = range(STEPS)) -> list[float]:
    rank, ranks = here()
    norms = []
    for step in steps:
        engine.backward(engine(inputs(step).chunk(ranks)[rank]))
        norms.append(engine.step().grad_norm or 0.0)
        with torch.no_grad():
            if hasattr(engine.module, "logit_scale"):
                engine.module.logit_scale.clamp_(max=1.35)  # as CLIP does
    return norms


def plain(
    kind: str, model: type[nn.Module] = Contrastive, steps: int = STEPS
) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = model()
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.05, weight_decay=0.1)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        module(inputs(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        optimizer.step()
        with torch.no_grad():
            if hasattr(module, "logit_scale"):
                module.logit_scale.clamp_(max=1.35)
    return norms, {name: p.detach() for name, p in module.named_parameters()}


CASES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "SGD": {"kind": "SGD"},
    "scalars only": {"model": Scalars},
    "sub-groups": {"zero": {"sub_group_size": 7}},
    "optimizer on nvme": {"zero": {"offload_optimizer": {"device": "nvme"}}},
    "parameters on nvme": {"zero": {"offload_param": {"device": "nvme"}}},
    "parameters on cpu": {"zero": {"offload_param": {"device": "cpu"}}},
    "bf16": {"kind": "SGD", "bf16": {"enabled": True}},
    "fp16": {"kind": "SGD", "fp16": {"enabled": True, "initial_scale_power": 8}},
}


def train_cases(directory: str) -> dict[str, Any]:
    actual = {}
    for name, case in CASES.items():
        for place in case.get("zero", {}).values():
            if isinstance(place, dict) and place["device"] == "nvme":
                place["nvme_path"] = directory
        engine = make_engine(3, **case)
        norms = train(engine)
        weights = {n: engine.full(n) for n, _ in engine.module.named_parameters()}
        engine.close()
        shapes = {n: tuple(p.shape) for n, p in engine.module.named_parameters()}
        assert shapes == {n: tuple(w.shape) for n, w in weights.items()}
        actual[name] = norms, weights
    return actual


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_scalars_train_like_plain_torch(ranks: int, tmp_path: Path) -> None:
    every_rank = (
        run_on_ranks(train_cases, ranks, str(tmp_path))
        if ranks > 1
        else [train_cases(str(tmp_path))]
    )
    for name, case in CASES.items():
        norms, weights = plain(case.get("kind", "AdamW"), case.get("model", Contrastive))
        wide = name in {"bf16", "fp16"}
        for answers in every_rank:
            own_norms, own_weights = answers[name]
            assert own_norms == pytest.approx(norms, rel=0.05 if wide else 1e-5), name
            for key, weight in weights.items():
                torch.testing.assert_close(
                    own_weights[key].float(), weight, rtol=0, atol=0.02 if wide else 2e-6, msg=name
                )


def whole_optimizer() -> dict[int, list[Any]]:
    actual = {}
    for stage in (0, 3):
        engine = make_engine(stage, "Lamb")
        train(engine)
        actual[stage] = [
            w.tolist()
            for n, _ in engine.module.named_parameters()
            if (w := engine.full(n)) is not None
        ]
        engine.close()
    return actual


def test_scalars_train_with_full_parameters() -> None:
    for actual in run_on_ranks(whole_optimizer, 2):
        for one, other in zip(actual[0], actual[3], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def save_half(directory: str, stage: int, kind: str) -> None:
    engine = make_engine(stage, kind)
    train(engine, range(2))
    engine.save_checkpoint(directory, tag=f"{stage}{kind}")
    engine.export(f"{directory}/{stage}{kind}.safetensors")
    engine.close()


def resume_half(directory: str, saved: list[str], stage: int) -> list[Any]:
    actual = []
    for tag in saved:
        engine = make_engine(stage, tag[1:])
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(0)
        engine.load_checkpoint(directory, tag=tag)
        norms = train(engine, range(2, STEPS))
        actual.append(
            (tag, norms, {n: engine.full(n) for n, _ in engine.module.named_parameters()})
        )
        engine.close()
    return actual


def save_all(directory: str, stages: tuple[int, ...]) -> None:
    for stage in stages:
        for kind in ("AdamW", "SGD"):
            save_half(directory, stage, kind)


def resume_all(directory: str, saved: list[str]) -> list[Any]:
    return [item for stage in (1, 3) for item in resume_half(directory, saved, stage)]


def test_scalars_resume_at_other_stages_and_ranks(tmp_path: Path) -> None:
    run_on_ranks(save_all, 2, str(tmp_path), (3, 2))
    saved = ["3AdamW", "3SGD", "2AdamW"]
    for ranks in (1, 4):
        answers = (
            run_on_ranks(resume_all, ranks, str(tmp_path), saved)
            if ranks > 1
            else [resume_all(str(tmp_path), saved)]
        )
        for tag, norms, weights in (item for answer in answers for item in answer):
            expected_norms, expected = plain(tag[1:])
            assert norms == pytest.approx(expected_norms[2:], rel=1e-5), tag
            for name, weight in expected.items():
                torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-6, msg=name)
