"""Layers of many kinds, cut into four stages, train as they do in plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerotrial
from tests.engine.pipelines import Block
from tests.engine.ranks import run_on_ranks
from zerotrial.extensions.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

pytestmark = pytest.mark.processes

RANKS, WIDTH, MICRO, STEPS = 4, 6, 2, 3
CLIP, LR, DECAY = 0.3, 1e-2, 0.01


class Frozen(Block):
    """Frozen layer: its output has no gradient."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.requires_grad_(False)


class Cuts(nn.Module):
    """Its gradients end before its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x).detach()  # type: ignore[no-any-return]


class Turned(nn.Module):
    """Layer that returns a transposed, non-contiguous view."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x if x.shape[0] == MICRO else x.t()).t()  # type: ignore[no-any-return]


class Apart(nn.Module):
    """Layer with an additive weight outside of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.places = nn.Embedding(MICRO, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        places: Tensor = self.places(torch.arange(len(x)))
        return torch.tanh(self.mix(x)) * self.scale + places


class Both(nn.Module):
    """Gives a list: output, input, a float without gradient, and an integer."""

    def __init__(self, *, ends: bool = False) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.ends = ends

    def forward(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value, self.mix(value), torch.full((len(value), 1), 0.5), torch.tensor(2)
        x, first, mask, number = value
        x = torch.tanh(self.mix(x)) * mask * number
        return x + first if self.ends else [x, first, mask, number]


class Woven(nn.Module):
    """Uses its weights several times, and gives tensors that share parts of their graph."""

    def __init__(self, *, ends: bool = False) -> None:
        super().__init__()
        self.biases = nn.ParameterList(torch.full((WIDTH,), 0.1 * part) for part in range(3))
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.places = nn.Embedding(MICRO, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.ends = ends

    def forward(self, value: Any) -> Any:
        x, side = (value, value) if isinstance(value, Tensor) else value[:2]
        first, second, both = self.biases
        x = x + (first + both) + side  # sums keep no tensors: to pass them twice is no error
        x = x + (second + both)
        for mix in (*self.mixes, *self.mixes):  # by turns: each is used between the other's uses
            x = torch.tanh(mix(x)) + x
        scaled = self.mixes[0].weight * self.scale
        x = torch.tanh(x @ scaled) @ scaled + self.normed(self.normed(x))
        places = self.places(torch.arange(len(x)))
        inner = torch.tanh(x + places)
        outer = torch.tanh(inner * places - side)
        weights_only = places * self.scale  # computed from weights only
        return outer + inner + weights_only if self.ends else [outer, inner, weights_only]


def _specs(kind: Callable[..., nn.Module], *arguments: Any, count: int = 8) -> list[Any]:
    return [LayerSpec(kind, *arguments) for _ in range(count)]


def _tied() -> TiedLayerSpec:
    return TiedLayerSpec("one", nn.Linear, WIDTH, WIDTH)


MODELS: dict[str, Callable[[], list[Any]]] = {
    "blocks": lambda: _specs(Block, WIDTH),
    "turned": lambda: _specs(Turned),
    "apart": lambda: _specs(Apart),
    "both": lambda: [*_specs(Both, count=7), LayerSpec(Both, ends=True)],
    "woven": lambda: [*_specs(Woven, count=7), LayerSpec(Woven, ends=True)],
    "frozen first": lambda: [LayerSpec(Frozen), *_specs(Block, WIDTH, count=7)],
    "cuts": lambda: [LayerSpec(Block, WIDTH), LayerSpec(Cuts), *_specs(Block, WIDTH, count=6)],
    "three owners": lambda: [
        *[_tied(), LayerSpec(Block, WIDTH), LayerSpec(Block, WIDTH), _tied()],
        *[*_specs(Block, WIDTH, count=3), _tied()],
    ],
    "in place": lambda: [
        *[LayerSpec(Block, WIDTH), LayerSpec(nn.ReLU, inplace=True)],
        *[LayerSpec(Block, WIDTH), LayerSpec(nn.Dropout, 0.0, inplace=True)],
        *[LayerSpec(nn.ReLU, inplace=True), *_specs(Block, WIDTH, count=3)],
    ],
}
BOTH_WAYS = [("1f1b", 1), ("zero-bubble", 2)]
CASES: list[tuple[str, str, int, int, int]] = [
    *[(name, *way, 0, 4) for name in MODELS for way in BOTH_WAYS if name != "in place"],
    ("in place", "1f1b", 1, 0, 4),
    *[("blocks", *way, 2, 4) for way in [*BOTH_WAYS, ("gpipe", 1), ("interleaved", 2)]],
    *[("both", *way, 1, 4) for way in BOTH_WAYS],
    ("woven", "zero-bubble", 2, 1, 4),
    *[("blocks", *way, 0, 1) for way in [*BOTH_WAYS, ("gpipe", 1), ("interleaved", 2)]],
    ("blocks", "1f1b", 1, 0, 3),
]
"""Model, schedule, chunks on each rank, layers that are computed again together, micro-batches."""


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.reshape(target.shape) - target).square().mean()


def _build(name: str, stages: int, **options: Any) -> PipelineModule:
    torch.manual_seed(0)
    options = {"partition_method": "uniform", "loss_fn": _loss, **options}
    return PipelineModule(MODELS[name](), num_stages=stages, **options)


def _data(step: int, count: int) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.randn(count * MICRO, WIDTH, generator=torch.Generator().manual_seed(step))
    return [(part, part.flip(0)) for part in drawn.split(MICRO)]


def _engine(model: PipelineModule, schedule: str, count: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": count,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": {"stage": 1},
        "pipeline": {"schedule": schedule},
        **more,
    }
    return zerotrial.initialize(model=model, config=config)[0]


def _train(case: tuple[str, str, int, int, int]) -> list[float]:
    name, schedule, chunks, interval, count = case
    model = _build(name, RANKS, chunks=chunks, activation_checkpoint_interval=interval)
    engine = _engine(model, schedule, count)
    results = []
    for step in range(STEPS):
        results.append(float(engine.train_batch(iter(_data(step, count)))))
        results.append(engine.get_global_grad_norm())
        engine.eval_batch(iter(_data(step + 50, count)))  # which leaves no trace
    engine.close()
    return results


def _overflow() -> dict[str, Any]:
    """In 16 bits, the gradients of one weight on one stage are once too large."""
    engine = _engine(_build("blocks", RANKS), "1f1b", 4, fp16={"enabled": True})
    if engine.stage_id == 1:
        weight = next(iter(engine.module.parameters()))
        handle = weight.register_hook(lambda gradient: gradient * float("inf"))
    scale = engine.scaler.scale
    before = {name: weight.clone() for name, weight in engine.stage.full_weights()}
    engine.train_batch(iter(_data(0, 4)))
    unchanged = [torch.equal(weight, before[name]) for name, weight in engine.stage.full_weights()]
    result: dict[str, Any] = {"kept": all(unchanged), "skipped": engine.skipped_steps}
    if engine.stage_id == 1:
        handle.remove()
    engine.train_batch(iter(_data(0, 4)))
    unchanged = [torch.equal(weight, before[name]) for name, weight in engine.stage.full_weights()]
    result |= {"moved": not any(unchanged), "skipped after": engine.skipped_steps}
    result["scales"] = scale, engine.scaler.scale
    engine.close()
    return result


def _computed() -> int:
    """Count how often a rank computes a layer under a split backward with checkpointing."""
    model = _build("blocks", RANKS, chunks=2, activation_checkpoint_interval=1)
    engine = _engine(model, "zero-bubble", 4)
    engine.train_batch(iter(_data(0, 4)))  # the first looks at shapes
    calls: list[str] = []
    for name, layer in model.layers.items():
        layer.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    engine.train_batch(iter(_data(1, 4)))
    engine.close()
    return len(calls)


def all_cases() -> dict[Any, Any]:
    return {
        "overflow": _overflow(),
        "computed": _computed(),
        **{case: _train(case) for case in CASES},
    }


def plain(name: str, count: int) -> list[float]:
    """Train in plain torch; returns losses and norms, in turn."""
    model = _build(name, 1)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LR, weight_decay=DECAY)
    results = []
    for step in range(STEPS):
        total = 0.0
        for inputs, target in _data(step, count):
            loss = _loss(model(inputs), target) / count
            loss.backward()
            total += float(loss.detach())
        for weight in weights:  # the engine also decays parameters without gradients
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        norm = float(sum(g.double().square().sum() for g in gradients) ** 0.5)
        for gradient in gradients:
            gradient.mul_(min(1.0, CLIP / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        results += [total, norm]
    return results


@pytest.fixture(scope="module")
def rank_results() -> list[dict[Any, Any]]:
    return run_on_ranks(all_cases, RANKS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_norms_match_plain_torch(
    rank_results: list[dict[Any, Any]], case: tuple[str, str, int, int, int]
) -> None:
    expected = plain(case[0], case[-1])
    for rank_result in rank_results:
        assert rank_result[case] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_overflow_on_one_stage_skips_the_step(
    rank_results: list[dict[Any, Any]],
) -> None:
    for rank_result in rank_results:
        result = rank_result["overflow"]
        assert result["kept"]
        assert result["skipped"] == result["skipped after"] == 1
        assert result["moved"]
        assert result["scales"] == rank_results[0]["overflow"]["scales"]


def test_split_backward_recomputes_once_per_half(
    rank_results: list[dict[Any, Any]],
) -> None:
    first, *other_ranks = [rank_result["computed"] for rank_result in rank_results]
    assert other_ranks == [2 * 4 * (1 + 2)] * (RANKS - 1)  # chunks, micro-batches
    assert first == 4 * (1 + 1) + 4 * (1 + 2)  # there is no half for the inputs of the model


def test_ignored_checkpointing_block_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = PipelineModule([LayerSpec(nn.Linear, WIDTH, 1)], num_stages=1, loss_fn=nn.MSELoss())
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "Adam", "params": {"lr": LR}},
        "activation_checkpointing": {"partition_activations": True},
    }
    engine, *_ = zerotrial.initialize(model=model, config=config)
    engine.close()
    messages = [
        record.getMessage() for record in caplog.records if "no effect on this Pipe" in record.msg
    ]
    assert len(messages) == 1
    assert "pipeline.activation_checkpoint_interval" in messages[0]
