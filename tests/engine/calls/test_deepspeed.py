"""Attributes that DeepSpeed scripts use, and errors for unsupported ones."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerotrial
from tests.engine.flat.test_core_cases import closing, inputs, make, mlp
from tests.engine.ranks import run_on_ranks
from zerolab.errors import EngineError
from zerotrial.engine.checkpoint.files import CheckpointError


def engine_of(model: nn.Module | None = None, **config: Any) -> Any:
    return zerotrial.initialize(
        model=model or nn.Linear(3, 2),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.8, 0.9]}},
            **config,
        },
    )[0]


def test_getters_return_the_configuration() -> None:
    engine = engine_of(
        gradient_accumulation_steps=3,
        bf16={"enabled": True},
        gradient_clipping=0.5,
        zero_optimization={"stage": 2},
        steps_per_print=7,
        wall_clock_breakdown=True,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    )
    assert engine.get_batch_info() == (6, 2, 3)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (False, True)
    assert engine.zero_optimization() is True
    assert engine.zero_optimization_partition_gradients() is True
    assert engine.zero_optimization_partition_weights() is False
    assert engine.gradient_clipping() == 0.5
    assert engine.dynamic_loss_scale() is False
    assert engine.steps_per_print() == 7
    assert engine.wall_clock_breakdown() is True
    assert (engine.optimizer_name(), engine.optimizer_params()["lr"]) == ("AdamW", 0.1)
    assert (engine.scheduler_name(), engine.scheduler_params()) == (
        "WarmupLR",
        {"warmup_num_steps": 4},
    )
    assert (engine.global_rank, engine.world_size, engine.dp_world_size) == (0, 1, 1)
    group = dist.group.WORLD if dist.is_initialized() else None  # stage 3 of a test before makes it
    assert engine.data_parallel_group is group
    engine.destroy()
    plain = engine_of(fp16={"enabled": True})
    assert (plain.fp16_enabled(), plain.bfloat16_enabled()) == (True, False)
    assert plain.dynamic_loss_scale() is True
    assert plain.zero_optimization() is False
    assert plain.gradient_clipping() == 0.0


def test_rates_and_momenta_get_and_set() -> None:
    engine = engine_of()
    assert engine.get_mom() == [(0.8, 0.9)]
    engine.set_lr(0.25)
    assert engine.get_lr() == [0.25]
    assert engine.optimizer.param_groups[0]["lr"] == 0.25
    sgd = engine_of(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.7}})
    assert sgd.get_mom() == [0.7]
    rate = torch.tensor(0.1)
    sgd.optimizer.param_groups[0]["lr"] = rate
    sgd.set_lr(0.5)
    assert sgd.optimizer.param_groups[0]["lr"] is rate
    assert sgd.get_lr() == [0.5]


def test_set_train_batch_size_at_a_boundary() -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    engine = engine_of(model, gradient_accumulation_steps=3)
    reference = torch.optim.AdamW(plain.parameters(), 0.1, (0.8, 0.9), weight_decay=0.0)
    updates = []
    for window in (3, 2, 2, 1, 4):
        if window != engine.gradient_accumulation_steps():
            engine.set_train_batch_size(2 * window)
        assert engine.get_batch_info() == (2 * window, 2, window)
        reference.zero_grad()
        for _ in range(window):
            batch = torch.randn(2, 3)
            engine.backward(engine(batch).pow(2).mean())
            updates.append(engine.step().updated)
            (plain(batch).pow(2).mean() / window).backward()
        reference.step()
        torch.testing.assert_close(model.weight, plain.weight)
    expected = [False, False, True, False, True, False, True, True, False, False, False, True]
    assert updates == expected
    assert engine.global_samples == 2 * 12


def test_invalid_train_batch_size_is_refused() -> None:
    engine = engine_of(gradient_accumulation_steps=2)
    for wrong in (0, -2, 3):
        with pytest.raises(EngineError, match=f"must be a multiple of 2 .*, got {wrong}"):
            engine.set_train_batch_size(wrong)
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step()
    with pytest.raises(EngineError, match=r"1 micro-batch\(es\) wait for the boundary"):
        engine.set_train_batch_size(8)


def test_resume_after_changed_window_length(tmp_path: Path) -> None:
    def step(engine: Any) -> bool:
        engine.backward(engine(torch.ones(2, 3)).mean())
        updated: bool = engine.step().updated
        return updated

    first = engine_of(gradient_accumulation_steps=3)
    assert [step(first) for _ in range(3)] == [False, False, True]
    first.set_train_batch_size(4)
    assert [step(first) for _ in range(3)] == [False, True, False]
    first.save_checkpoint(tmp_path)
    second = engine_of(gradient_accumulation_steps=2)
    second.load_checkpoint(tmp_path)
    assert [step(second) for _ in range(3)] == [True, False, True]
    assert second.micro_steps == 9


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.rest = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.rest
        return out

    @property
    def broken(self) -> int:
        return len(None)  # type: ignore[arg-type]


def test_module_state_dict_without_frozen_parameters() -> None:
    engine = engine_of(Frozen())
    assert set(engine.module_state_dict()) == {"layer.weight", "layer.bias", "rest"}
    trained = engine.module_state_dict(exclude_frozen_parameters=True)
    assert set(trained) == {"layer.weight", "layer.bias"}
    assert torch.equal(trained["layer.weight"], engine.module.layer.weight)


def test_deepspeed_io_matches_initialize() -> None:
    engine = engine_of()
    data = torch.utils.data.TensorDataset(torch.arange(8.0).view(8, 1))
    loader = engine.deepspeed_io(data)
    assert sorted(torch.cat([batch[0] for batch in loader]).flatten().tolist()) == list(range(8))
    assert len(loader) == 4


def test_loader_shows_dataset_and_batch_size() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 3))
    loader = engine_of(train_batch_size=2).deepspeed_io(data)
    assert loader.batch_size == len(next(iter(loader))[0])
    assert loader.dataset is data
    assert len(loader.sampler) == len(data)


def test_client_state_under_its_other_name(tmp_path: Path) -> None:
    engine = engine_of()
    engine.save_checkpoint(tmp_path, client_sd={"step": 7})
    assert engine.load_checkpoint(tmp_path)[1] == {"step": 7}
    with pytest.raises(CheckpointError, match="client_sd: is another name of client_state"):
        engine.save_checkpoint(tmp_path, client_state={}, client_sd={})


def test_custom_load_function_is_refused(tmp_path: Path) -> None:
    engine = engine_of()
    engine.save_checkpoint(tmp_path, tag="t")
    with pytest.raises(EngineError, match=r"custom_load_fn\): must be None.*export\(\).*set_full"):
        engine.load_checkpoint(tmp_path, custom_load_fn=lambda src, dst: None)


def test_unknown_attribute_names_engine_and_module() -> None:
    engine = engine_of(Frozen())
    assert engine.rest is engine.module.rest
    with pytest.raises(AttributeError) as caught:
        engine.nonsense  # noqa: B018
    assert str(caught.value) == (
        "neither the engine nor its module (Frozen) has an attribute 'nonsense'"
    )
    with pytest.raises(AttributeError, match=r"'get_batch_inf'; did you mean 'get_batch_info'\?"):
        engine.get_batch_inf()
    with pytest.raises(AttributeError, match=r"set zero_optimization\.offload_optimizer in"):
        engine.offload_states()
    with pytest.raises(TypeError, match="NoneType"):  # the module's error is unchanged
        engine.broken  # noqa: B018
    assert not hasattr(engine, "is_pipe_parallel")


def own_backwards(stage: int) -> list[float]:
    """Largest gap to plain torch where each loss has its own ``backward()``."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain = mlp()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)  # sees a factor on gradients
    engine = make(
        mlp(),
        stage,
        "SGD",
        0.5,
        gradient_accumulation_steps=2,
        fp16={"enabled": True, "initial_scale_power": 6},
        zero={"reduce_bucket_size": 50},
    )
    scales = []
    with closing(engine):
        for step in range(6):
            parts = inputs(step, ranks)
            for part in parts:
                (plain(part).pow(2).mean() / ranks / 2).backward()
            loss = engine(parts[rank]).float().pow(2).mean()
            scaled = engine.scale(loss)
            scales.append((scaled / loss).item())
            scaled.backward()
            if engine.step().updated:
                optimizer.step()
                optimizer.zero_grad()
        expected = dict(plain.named_parameters())
        gaps = [
            ((weight - expected[name]).norm() / expected[name].norm()).item()
            for name, weight in engine.stage.full_weights()
        ]
        return [max(gaps), *scales, float(engine.global_steps)]


def check_own_backwards() -> dict[int, list[float]]:
    return {stage: own_backwards(stage) for stage in range(4)}


@pytest.mark.processes
def test_scaled_loss_backward_at_every_stage() -> None:
    for differences in run_on_ranks(check_own_backwards, 2):
        for stage, (gap, *scales, steps) in differences.items():
            assert gap < 5e-3, stage
            assert scales == [64.0] * 6
            assert steps == 3.0


def test_invalid_loss_is_not_scaled() -> None:
    engine = engine_of()
    with pytest.raises(EngineError, match=r"scale\(loss\): loss must be a scalar tensor"):
        engine.scale(engine(torch.ones(2, 3)))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_overflow_keeps_last_grad_norm(stage: int) -> None:
    config = {
        "train_batch_size": 1,
        "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": stage},
    }
    engine: Any = zerotrial.initialize(model=nn.Linear(2, 1, bias=False), config=config)[0]

    def step(factor: float) -> Any:
        engine.backward(engine(torch.ones(1, 2)).sum() * factor)
        return engine.step()

    assert not step(math.inf).updated
    assert engine.get_global_grad_norm() is None
    assert step(1.0).updated
    assert engine.get_global_grad_norm() == pytest.approx(2**0.5, rel=1e-3)
    for factor in (math.inf, math.nan):
        assert not step(factor).updated
        assert engine.get_global_grad_norm() == pytest.approx(2**0.5, rel=1e-3)
    engine.close()


def test_plateau_schedule_follows_given_metric() -> None:
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "scheduler": {"type": "ReduceLROnPlateau", "params": {"factor": 0.5, "patience": 0}},
    }
    from_file = zerotrial.initialize(model=nn.Linear(1, 1), config=config)[0]
    config.pop("scheduler")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    result = zerotrial.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )[0]
    for engine in (from_file, result):

        def step(engine: Any = engine, **metrics: float) -> list[float]:
            engine.backward(engine(torch.ones(1, 1)).sum())
            engine.step(lr_kwargs=metrics)
            rates: list[float] = engine.get_lr()
            return rates

        assert step() == [1.0]
        assert step(metrics=1.0) == [1.0]
        assert step() == [1.0]
        assert step(metrics=2.0) == [0.5]
        engine.lr_scheduler.step(3.0)
        assert engine.get_lr() == [0.25]
        engine.close()
