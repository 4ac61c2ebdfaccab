"""The engine's calls on one process: counters, user errors, and DeepSpeed's faults."""

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerotrial
from zerolab.errors import ConfigError, ZerolabError

STAGES = [0, 1, 2]
HALF: list[dict[str, Any]] = [
    {},
    {"bf16": {"enabled": True}},
    {"fp16": {"enabled": True, "initial_scale_power": 8}},
]


def make(model: nn.Module, optimizer: str = "SGD", lr: float = 0.1, **config: Any) -> Any:
    engine, *_ = zerotrial.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": optimizer, "params": {"lr": lr}},
            **config,
        },
    )
    return engine


def ones(inputs: int = 3, outputs: int = 1) -> nn.Linear:
    model = nn.Linear(inputs, outputs, bias=False)
    nn.init.ones_(model.weight)
    return model


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


@pytest.mark.parametrize(("stage", "half"), list(itertools.product(STAGES, HALF)))
def test_first_step_is_equal_at_all_stages_and_precisions(stage: int, half: dict[str, Any]) -> None:
    """DeepSpeed divides by a loss scale it never applied, at stage 0 in fp16."""
    model = ones()
    engine = make(model, **zero(stage), **half)
    engine.backward(engine(torch.ones(2, 3)).mean())
    result = engine.step()
    assert model.weight.float().flatten().tolist() == pytest.approx([0.9] * 3, rel=4e-3)
    assert result.grad_norm == pytest.approx(3**0.5, rel=1e-6)


@pytest.mark.parametrize(("stage", "half"), list(itertools.product(STAGES, HALF)))
def test_construction_takes_no_optimizer_step(stage: int, half: dict[str, Any]) -> None:
    """DeepSpeed's stage 0 starts Adam's count at 1, and its first update is a quarter too small."""
    model = ones()
    engine = make(model, "AdamW", **zero(stage), **half)
    assert not engine.optimizer.state
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 3)).mean())
        engine.step()
    assert engine.stage.updater.scalars() == {"group0.step": 3.0}
    assert model.weight.float().flatten().tolist() == pytest.approx([0.7] * 3, rel=5e-3)


@pytest.mark.parametrize(("stage", "half"), list(itertools.product(STAGES, HALF)))
def test_two_backward_calls_before_one_step_add_up(stage: int, half: dict[str, Any]) -> None:
    model = ones()
    engine = make(model, lr=0.25, **zero(stage), **half)
    for factor in (1.0, 2.0, 0.5):
        engine.backward((engine(torch.ones(2, 3)) * factor).mean())
    result = engine.step()
    assert model.weight.float().flatten().tolist() == pytest.approx([1 - 0.25 * 3.5] * 3)
    assert result.grad_norm == pytest.approx(3.5 * 3**0.5, rel=1e-6)
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step()
    assert model.weight.float().flatten().tolist() == pytest.approx([1 - 0.25 * 4.5] * 3)


def test_masters_keep_bits_lost_by_the_cast() -> None:
    model = ones()
    exact = 1.0 + 2.0**-12  # not a bf16 number
    nn.init.constant_(model.weight, exact)
    engine = make(model, **zero(1), bf16={"enabled": True})
    (piece,) = engine.stage.pieces()
    assert piece.tensors["master"].tolist() == [exact] * 3
    assert model.weight.dtype == torch.bfloat16
    assert dict(engine.stage.full_weights())["weight"].flatten().tolist() == [exact] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_counters_and_boundaries(stage: int) -> None:
    engine = make(ones(), gradient_accumulation_steps=3, **zero(stage))
    seen = []
    for _ in range(7):
        boundary = engine.is_gradient_accumulation_boundary()
        engine.backward(engine(torch.ones(2, 3)).mean())
        applied = engine.step().updated
        assert applied is engine.was_step_applied() is boundary
        seen.append((boundary, engine.micro_steps, engine.global_steps, engine.global_samples))
    assert seen[:4] == [(False, 1, 0, 0), (False, 2, 0, 0), (True, 3, 1, 6), (False, 4, 1, 6)]
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (6, 2)
    assert engine.gradient_accumulation_steps() == 3
    assert engine.zero_optimization_stage() == stage


def test_backward_returns_loss_divided_by_steps() -> None:
    engine = make(ones(), gradient_accumulation_steps=4)
    loss = engine(torch.ones(2, 3)).mean()
    assert engine.backward(loss).item() == pytest.approx(3.0 / 4)


@pytest.mark.parametrize("stage", STAGES)
def test_step_without_backward_is_error(stage: int) -> None:
    engine = make(ones(), **zero(stage))
    with pytest.raises(ZerolabError, match=r"step\(\) without backward\(\)"):
        engine.step()
    engine.module(torch.ones(2, 3)).mean().backward()
    assert engine.step().updated


def test_invalid_loss_is_refused() -> None:
    engine = make(ones())
    with pytest.raises(ZerolabError, match=r"must be a scalar tensor, got \(2, 1\)"):
        engine.backward(engine(torch.ones(2, 3)))
    with pytest.raises(ZerolabError, match="does not depend on trained parameters"):
        engine.backward(torch.tensor(1.0))


@pytest.mark.parametrize("stage", STAGES)
def test_non_finite_gradient_is_skipped_and_counted(stage: int) -> None:
    model = ones()
    engine, _, _, schedule = zerotrial.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
            "optimizer": {"type": "AdamW"},
            "scheduler": {"type": "LinearWarmupLR", "params": {"warmup_num_steps": 4}},
            **zero(stage),
        },
    )
    engine.backward(engine(torch.ones(2, 3)).mean() * float("inf"))
    result = engine.step()
    assert (result.updated, engine.skipped_steps, engine.global_steps) == (False, 1, 1)
    assert (engine.loss_scale, schedule.last_batch_iteration) == (8.0, -1)
    assert model.weight.tolist() == [[1.0, 1.0, 1.0]]
    engine.backward(engine(torch.ones(2, 3)).mean())
    assert engine.step().updated
    assert (engine.skipped_steps, schedule.last_batch_iteration) == (1, 0)


def test_schedule_steps_once_per_optimizer_step() -> None:
    engine = make(
        ones(),
        gradient_accumulation_steps=2,
        scheduler={"type": "LinearWarmupLR", "params": {"warmup_num_steps": 10}},
        lr=1.0,
    )
    rates = []
    for _ in range(6):
        rates.append(engine.get_lr()[0])
        engine.backward(engine(torch.ones(2, 3)).mean())
        engine.step()
    assert rates == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3, 0.3])


@pytest.mark.parametrize(
    "block",
    [
        {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
        None,
    ],
)
def test_torch_schedules_by_name_and_callable(block: dict[str, Any] | None) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    scheduler = None
    if block is None:
        scheduler = lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)  # noqa: E731
    else:
        config["scheduler"] = block
    engine, _, _, schedule = zerotrial.initialize(
        model=ones(), config=config, lr_scheduler=scheduler
    )
    for expected in (1.0, 0.5, 0.25):
        assert engine.get_lr() == [expected]
        engine.backward(engine(torch.ones(2, 3)).mean())
        engine.step()
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)


def test_schedule_on_user_optimizer() -> None:
    model = ones()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine, returned, _, _ = zerotrial.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config={"train_batch_size": 2}
    )
    assert returned is optimizer
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step()
    assert engine.get_lr() == [0.5]
    assert model.weight.flatten().tolist() == pytest.approx([0.0] * 3)


class Nested(nn.Module):
    """Module with mappings as inputs and outputs, a counting buffer and an extra method."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, batch: dict[str, Tensor], *, scale: float = 1.0) -> dict[str, Tensor]:
        self.calls += 1
        return {"loss": self.layer(batch["x"]).mean() * scale, "ids": batch["ids"]}

    def describe(self) -> str:
        return "nested"


@pytest.mark.parametrize("half", HALF)
def test_mappings_are_cast_by_floats_only(half: dict[str, Any]) -> None:
    model = Nested()
    engine = make(model, **half)
    batch = {"x": torch.ones(2, 3), "ids": torch.tensor([1, 2])}
    out = engine(batch, scale=2.0)
    assert out["ids"].dtype == torch.int64
    assert out["loss"].dtype == model.layer.weight.dtype
    assert batch["x"].dtype == torch.float32
    engine.backward(out["loss"])
    engine.step()
    assert engine.calls == 1
    assert engine.describe() == "nested"


@dataclass
class Pair:
    """A dataclass input."""

    x: Tensor
    ids: Tensor


def test_nested_containers_are_cast() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, pair: Pair, more: list[Tensor]) -> Tensor:
            assert pair.ids.dtype == torch.int64
            return ((pair.x + more[0]) * self.weight).mean()

    engine = make(Model(), bf16={"enabled": True})
    pair = Pair(torch.ones(2, 3), torch.arange(2))
    loss = engine(pair, [torch.ones(2, 3)])
    assert loss.dtype == torch.bfloat16


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_between_micro_batches(stage: int) -> None:
    results = []
    for evaluate in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        engine = make(model, "AdamW", gradient_accumulation_steps=2, **zero(stage))
        for _ in range(4):
            engine.backward(engine(torch.ones(2, 3)).mean())
            if evaluate:
                engine.eval()
                with torch.no_grad():
                    assert not engine(torch.ones(2, 3)).requires_grad
                engine.train()
            engine.step()
        results.append(model(torch.ones(1, 3)).item())
    assert results[0] == results[1]


def test_train_batch_and_eval_batch() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = ones()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return ((self.layer(x) - y) ** 2).mean()

    engine = make(Loss(), lr=0.01, gradient_accumulation_steps=2)
    batches = itertools.repeat((torch.ones(2, 3), torch.zeros(2, 1)))
    first = engine.train_batch(batches)
    assert first.item() == pytest.approx(9.0)
    assert (engine.global_steps, engine.micro_steps) == (1, 2)
    assert engine.eval_batch(batches).item() < 9.0
    assert engine.module.training
    with pytest.raises(ZerolabError, match="training_data"):
        engine.train_batch()


def test_loader_reshuffles_and_feeds_train_batch() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).pow(2).mean()

    data = torch.utils.data.TensorDataset(torch.arange(20.0).view(20, 1))
    engine, _, loader, _ = zerotrial.initialize(
        model=Loss(),
        training_data=data,
        config={
            "train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        },
    )
    epochs = [torch.cat([batch[0] for batch in loader]).flatten().tolist() for _ in range(3)]
    assert len(loader) == 10
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    for _ in range(7):  # more than an epoch
        engine.train_batch()
    assert engine.global_steps == 7


@pytest.mark.parametrize("stage", STAGES)
def test_gan_of_two_engines_matches_plain_torch(stage: int) -> None:
    """The discriminator must ignore gradients of the generator's loss."""

    def networks() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(3)
        return nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    plain_g, plain_d = networks()
    plain = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain_g, plain_d)]
    generator, discriminator = networks()
    g, d = make(generator, **zero(stage)), make(discriminator, **zero(stage))
    torch.manual_seed(4)
    for _ in range(4):
        real, noise = torch.randn(5, 3), torch.randn(5, 2)
        loss = plain_d(plain_g(noise).detach()).mean() - plain_d(real).mean()
        plain[1].zero_grad()
        loss.backward()
        plain[1].step()
        plain[0].zero_grad()
        (-plain_d(plain_g(noise)).mean()).backward()
        plain[0].step()

        d.backward(d(g(noise).detach()).mean() - d(real).mean())
        d.step()
        g.backward(-d(g(noise)).mean())
        g.step()
    for engine, reference in ((generator, plain_g), (discriminator, plain_d)):
        for actual, expected in zip(engine.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_sparse_embedding_gradients(stage: int) -> None:
    model = nn.Embedding(6, 2, sparse=True)
    nn.init.ones_(model.weight)
    engine = make(model, **zero(stage))
    engine.backward(engine(torch.tensor([1, 1, 4])).sum())
    engine.step()
    assert model.weight[:, 0].tolist() == pytest.approx([1.0, 0.8, 1.0, 1.0, 0.9, 1.0])


@pytest.mark.parametrize("stage", STAGES)
def test_gradient_penalty(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    plain.load_state_dict(model.state_dict())

    def penalty(module: Any, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2).mean()

    x = torch.randn(2, 3, requires_grad=True)
    penalty(plain, x).backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
    engine = make(model, **zero(stage))
    engine.backward(penalty(engine, x))
    engine.step()
    for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, expected)


class Reused(nn.Module):
    """One layer, used inside two checkpointed calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
        return x.mean()


def test_reentrant_checkpoints_of_shared_layer() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    engine = make(Reused(), **zero(1))
    with pytest.raises(ZerolabError, match="use_reentrant=False"):
        engine.backward(engine(x))
    engine = make(Reused(), **zero(1, overlap_comm=False))
    engine.backward(engine(x))
    assert engine.step().updated


@pytest.mark.parametrize("stage", STAGES)
def test_unused_parameter_is_named(stage: int) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x).mean()

    engine = make(Half(), **zero(stage))
    engine.backward(engine(torch.ones(2, 3)))
    assert engine.step().updated
    engine = make(Half(), **zero(stage, ignore_unused_parameters=False))
    with pytest.raises(ZerolabError, match=r"idle\.weight, idle\.bias|idle\.bias, idle\.weight"):
        engine.backward(engine(torch.ones(2, 3)))


@pytest.mark.parametrize(
    ("zero_block", "count"),
    [
        ({"reduce_bucket_size": 10**9}, 1),
        ({"reduce_bucket_size": 500}, 4),
        ({"allgather_bucket_size": 500}, 4),
    ],
)
def test_bucket_sizes_are_limits(zero_block: dict[str, int], count: int) -> None:
    model = nn.Sequential(*[nn.Linear(20, 20) for _ in range(4)])
    engine = make(model, **zero(1, **zero_block))
    assert len(engine.stage.buckets) == count
    total = sum(p.numel() for p in model.parameters())
    assert sum(bucket.numel for bucket in engine.stage.buckets) == total


def test_default_bucket_size_overlaps_backward() -> None:
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
    assert len(make(model, **zero(1)).stage.buckets) == 4
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
    assert len(make(model, **zero(1, overlap_comm=False)).stage.buckets) == 1


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("overlap", [True, False])
def test_reduction_overlaps_backward_by_default(stage: int, overlap: bool) -> None:
    model = nn.Sequential(*[nn.Linear(20, 20) for _ in range(4)])
    engine = make(model, **zero(stage, reduce_bucket_size=500, overlap_comm=overlap))
    gradients = engine.stage.gradients
    sent_when_first_layer_is_reached = []
    model[1].register_full_backward_hook(
        lambda *_: sent_when_first_layer_is_reached.append(gradients._next)
    )
    engine.backward(engine(torch.ones(2, 20)).mean())
    assert gradients._next == 4
    assert sent_when_first_layer_is_reached[0] == (2 if overlap else 0)
    engine.step()


def test_arguments_of_initialize_are_checked_together(tmp_path: Path) -> None:
    args = argparse.Namespace(deepspeed_config="ds.json")
    with pytest.raises(ConfigError) as both:
        zerotrial.initialize(args=args, config={"train_batch_size": 1})
    assert "model: must be a torch.nn.Module" in str(both.value)
    assert "config: is given twice" in str(both.value)
    with pytest.raises(ConfigError, match="config: is missing"):
        zerotrial.initialize(model=ones())
    with pytest.raises(ConfigError) as types:
        zerotrial.initialize(model=ones(), optimizer=3, training_data=iter([]), config=4)
    assert [problem.split(":")[0] for problem in types.value.problems] == [
        "optimizer",
        "training_data",
        "config",
    ]
    with pytest.raises(ConfigError, match="parameter group 0: must have 'params', has lr"):
        zerotrial.initialize(
            model=ones(),
            model_parameters=[{"lr": 1.0}],
            config={"train_batch_size": 1, "optimizer": {"type": "SGD"}},
        )
    model = ones()
    model.requires_grad_(requires_grad=False)
    with pytest.raises(ConfigError, match="nothing to train: for evaluation leave"):
        make(model)
    with pytest.raises(ConfigError, match="stages: needs a PipelineModule, got Linear; leave"):
        make(ones(), pipeline={"stages": 2})
    model = ones()
    with pytest.raises(ConfigError, match="a parameter that model has not"):
        zerotrial.initialize(
            model=ones(),
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            config={"train_batch_size": 1},
        )
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1)
    with pytest.raises(ConfigError, match="an instance needs its optimizer"):
        zerotrial.initialize(
            model=model,
            lr_scheduler=schedule,
            config={"train_batch_size": 1, "optimizer": {"type": "SGD"}},
        )
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 1, "optimizer": {"type": "SGD"}}))
    engine, *_ = zerotrial.initialize(
        args=argparse.Namespace(deepspeed_config=str(path)), model=model
    )
    assert engine.train_batch_size() == 1


@pytest.mark.parametrize(
    "problem",
    [
        {"gradient_clipping": -1.0},
        {"fp16": {"enabled": True, "hysteresis": 0}},
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
    ],
)
def test_ignored_deepspeed_arguments_are_refused(problem: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make(ones(), **problem)


def test_closed_engine_frees_the_module() -> None:
    model = ones()
    engine = make(model)
    engine.close()
    model(torch.ones(2, 3)).mean().backward()
    assert model.weight.grad is not None


def test_no_sync_accumulates_until_outside_step() -> None:
    model = ones()
    engine = make(model, **zero(1))
    with engine.no_sync():
        engine.backward(engine(torch.ones(2, 3)).mean())
        with pytest.raises(ZerolabError, match="inside no_sync"):
            engine.step()
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step()
    assert model.weight.flatten().tolist() == pytest.approx([0.8] * 3)


def test_boundary_can_be_set_manually() -> None:
    engine = make(ones(), gradient_accumulation_steps=4)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(torch.ones(2, 3)).mean())
    assert engine.step().updated
    engine.set_gradient_accumulation_boundary(None)
    assert not engine.is_gradient_accumulation_boundary()


@pytest.mark.parametrize("stage", STAGES)
def test_batch_norm_in_16_bits_keeps_fp32_statistics(stage: int) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 1))
    engine = make(model, bf16={"enabled": True}, **zero(stage))
    engine.backward(engine(torch.randn(2, 1, 8, 8)).float().mean())
    engine.step()
    assert model[1].running_mean.dtype == torch.float32
    assert model[1].running_mean.any()


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (0, {}),
        (1, {}),
        (2, {}),
        (2, {"offload_optimizer": {"device": "cpu"}}),
        (3, {}),
    ],
)
@pytest.mark.parametrize("half", HALF)
def test_written_weights_last(stage: int, more: dict[str, Any], half: dict[str, Any]) -> None:
    model = nn.Sequential(ones(3, 3), ones(3, 3))
    nn.init.constant_(model[1].weight, 1.0 + 2**-12)  # lost in 16 bits, present in the master
    engine = make(model, lr=0.0, **zero(stage, **more), **half)

    def step() -> dict[str, list[float]]:
        engine.backward(engine(torch.ones(2, 3)).mean())
        engine.step()
        weights = engine.stage.full_weights(torch.float32)
        return {name: weight.flatten().tolist() for name, weight in weights}

    step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(max=1.5)  # written to, and left as it was
        next(model.parameters()).fill_(0.25)
    assert step() == {"0.weight": [0.25] * 9, "1.weight": [1.0 + 2**-12] * 9}
    state = {name: torch.full((3, 3), 0.5) for name in ("0.weight", "1.weight")}
    if stage < 3:
        engine.module.load_state_dict(state)
        assert step() == dict.fromkeys(state, [0.5] * 9)
