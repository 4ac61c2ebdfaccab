"""Optimizers whose states have another shape than the parameter, as SOAP's and an 8-bit Adam's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerotrial
from tests.engine.ranks import run_on_ranks
from zerolab.errors import ConfigError, ZerolabError
from zerotrial.engine.checkpoint.files import CheckpointError

STEPS = 3


class Factored(torch.optim.Optimizer):
    """Keeps a factor for each dimension, scales of blocks, and a counter, as others do."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"] = torch.zeros(1, 1, 1)
                    state["ready"] = False
                    state["factors"] = [torch.zeros(n, n) for n in parameter.shape]
                    state["scale"] = {"absmax": torch.ones(3, dtype=torch.float64)}
                    state["mean"] = torch.zeros_like(parameter)
                self._update(parameter, state, group["lr"])

    @staticmethod
    def _update(parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        gradient = parameter.grad
        state["count"] += 1
        state["ready"] = True
        state["scale"]["absmax"] *= 0.9
        state["mean"].lerp_(gradient, 0.3)
        update = state["mean"]
        for dimension, factor in enumerate(state["factors"]):
            rows = gradient.movedim(dimension, 0).reshape(len(factor), -1)
            factor.lerp_(rows @ rows.T, 0.5)
            update = torch.tensordot(update, factor + torch.eye(len(factor)), dims=([0], [0]))
        step = lr * float(state["scale"]["absmax"][0]) / float(state["count"])
        parameter.sub_(update, alpha=step)


class Flat(Factored):
    elementwise = True


class Odd(Factored):
    """Optimizer with a state that no checkpoint can store."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["owner"] = object()


class Configured(Odd):
    """Optimizer with extra attributes, like most user classes; one of them knows the model."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.known, self.factor = {"parameters": params}, 1.0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.known["parameters"]:
            parameter.mul_(self.factor).add_(1.0)
        super().step()


class Mostly(torch.optim.SGD):
    elementwise = True


class Numbered(torch.optim.Optimizer):
    """Keeps numbers of each parameter's own, and a flag, that steer its steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            self.look_at(state, float(parameter.grad.abs().max()), parameter.numel())
            parameter.sub_(parameter.grad, alpha=0.1 / (1 + state["peak"]))

    def look_at(self, state: dict[str, Any], largest: float, numel: int) -> None:
        state["peak"] = max(state.get("peak", 0.0), largest)
        state["even"] = numel % 2 == 0
        state["seed"] = 2**60 + numel  # more digits than a float has


class FlatNumbered(Numbered):
    elementwise = True

    def look_at(self, state: dict[str, Any], largest: float, numel: int) -> None:
        state["peak"] = largest


class Seeded(FlatNumbered):
    def look_at(self, state: dict[str, Any], largest: float, numel: int) -> None:
        state["peak"], state["seed"] = 0.0, 2**60 + 1  # more digits than a float has


class Sized(FlatNumbered):
    def look_at(self, state: dict[str, Any], largest: float, numel: int) -> None:
        state["peak"], state["numel"] = 0.0, numel


class Named(FlatNumbered):
    def look_at(self, state: dict[str, Any], largest: float, numel: int) -> None:
        state["peak"], state["phase"] = 0.0, "early"


class Listed(FlatNumbered):
    def look_at(self, state: dict[str, Any], largest: float, numel: int) -> None:
        state["peak"], state["history"] = 0.0, [1.0]


class Flagged(FlatNumbered):
    """Keeps a flag that is the same for all, and is set in the second step alone."""

    def look_at(self, state: dict[str, Any], largest: float, numel: int) -> None:
        state["slow"] = state.get("slow", False) or state["step"] == 2
        state["peak"] = 2.0 if state["slow"] is True else 0.0


class Uneven(FlatNumbered):
    """Keeps a number of each rank's own from its fifth step on."""

    def look_at(self, state: dict[str, Any], largest: float, numel: int) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        state["peak"] = float(rank) if state["step"] >= 5 else 0.0


class Turning(Numbered):
    """Optimizer whose number becomes an unstorable state in its sixth step."""

    def look_at(self, state: dict[str, Any], largest: float, numel: int) -> None:
        state["peak"], state["turn"] = 0.0, 0 if state["step"] < 6 else object()


class Later(torch.optim.Optimizer):
    """Keeps a state from a step and a size on only, as an 8-bit Adam and a history do."""

    def __init__(self, params: Any, state: Any, step: int = 1, numel: int = 0) -> None:
        super().__init__(params, {"lr": 0.1})
        self.late, self.at, self.numel = state, step, numel

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            if state["step"] >= self.at and parameter.numel() >= self.numel:
                state.setdefault("late", self.late)


class FlatLater(Later):
    elementwise = True


class Slow(torch.optim.Optimizer):
    """Optimizer that pulls weights to their values of its second step, with one common state.

    Which parameters have such a copy depends on their size; another has numbers for its rows.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        shared = self.state["shared"]
        shared["steps"] = shared.get("steps", 0) + 1
        shared.setdefault("path", [torch.zeros(2)])[0].add_(1 / shared["steps"])
        self.look_at(shared)
        rate = float(shared["path"][0].sum()) / 40
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.5)
            parameter.sub_(state["mean"], alpha=rate)
            if shared["steps"] == 2 and parameter.numel() % 2 == 0:
                state["slow"] = parameter.double()
            if shared["steps"] == 3 and parameter.dim() == 2:
                state["rows"] = parameter.mean(1, keepdim=True)
            if "slow" in state:
                parameter.lerp_(state["slow"].to(parameter), 0.3)
            if "rows" in state:
                parameter.add_(state["rows"].expand(-1, parameter.shape[1]), alpha=0.1)

    def look_at(self, shared: dict[str, Any]) -> None:
        """Nothing more."""


class FlatSlow(Slow):
    elementwise = True


class Owned(Slow):
    def look_at(self, shared: dict[str, Any]) -> None:
        self.state["owner"] = object()  # type: ignore[assignment]


class Keyed(Slow):
    def look_at(self, shared: dict[str, Any]) -> None:
        self.state[(1, 2)] = {}


class Apart(Slow):
    """Optimizer whose common state differs between ranks."""

    def look_at(self, shared: dict[str, Any]) -> None:
        shared["rank"] = dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1))


def engine_of(stage: int, kind: type[torch.optim.Optimizer] = Factored, **zero: Any) -> Any:
    module = model()
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": stage, **zero},
    }
    return zerotrial.initialize(model=module, optimizer=kind(module.parameters()), config=config)[0]


def train(engine: Any, steps: range) -> list[float]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    for step in steps:
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(engine.get_global_grad_norm())
    return losses


def resumed(
    directory: str, saving: int, loading: int, kind: type[torch.optim.Optimizer] = Factored
) -> bool:
    """Resume at another stage, and compare with the uninterrupted run."""
    engine = engine_of(saving, kind)
    train(engine, range(STEPS))
    engine.save_checkpoint(directory)
    expected = train(engine, range(STEPS, 2 * STEPS))
    states = list(engine.optimizer.state.values())
    engine.close()
    other = engine_of(loading, kind)
    other.load_checkpoint(directory)
    assert train(other, range(STEPS, 2 * STEPS)) == pytest.approx(expected, rel=1e-5)
    if issubclass(kind, Numbered) and other.optimizer.state:
        assert {type(s["step"]) for s in other.optimizer.state.values()} == {int}
        assert {s["step"] for s in states} == {s["step"] for s in other.optimizer.state.values()}
    other.close()
    return True


PAIRS = [(0, 0), (1, 2), (2, 3), (3, 0), (3, 3)]


@pytest.mark.parametrize("kind", [Factored, Numbered, Flagged, Slow])
@pytest.mark.parametrize(("saving", "loading"), PAIRS)
def test_states_of_any_shape_resume(
    tmp_path: Path, saving: int, loading: int, kind: type[torch.optim.Optimizer]
) -> None:
    assert resumed(str(tmp_path), saving, loading, kind)


def on_two_ranks(directory: str) -> dict[str, Any]:
    for saving, loading in PAIRS:
        resumed(f"{directory}/{saving}{loading}", saving, loading)
    resumed(f"{directory}/numbered", 1, 3, Numbered)
    resumed(f"{directory}/slow", 1, 3, Slow)
    engine = engine_of(1)
    train(engine, range(STEPS))
    engine.save_checkpoint(f"{directory}/one")
    engine.close()
    refused = []
    for kind in (Uneven, Apart):
        uneven = engine_of(1, kind)
        train(uneven, range(5))
        with pytest.raises(ZerolabError) as caught:
            uneven.save_checkpoint(f"{directory}/uneven")
        uneven.close()
        refused.append(str(caught.value))
    files = sorted(p.name for p in Path(f"{directory}/one").rglob("states-*.pt"))
    return {"files": files, "refused": refused}


@pytest.mark.processes
def test_states_of_two_ranks_resume_on_one(tmp_path: Path) -> None:
    for results in run_on_ranks(on_two_ranks, 2, str(tmp_path)):
        assert results["files"] == ["states-00000.pt", "states-00001.pt"]
        assert "got 'peak' 0.0 and 1.0" in results["refused"][0]
        assert (
            "Apart must keep the same on all ranks under keys that are no" in results["refused"][1]
        )
        assert "none, on some of 2 ranks for 'shared'" in results["refused"][1]
    engine, other = engine_of(0), engine_of(3)
    train(engine, range(STEPS))
    other.load_checkpoint(tmp_path / "one")
    expected = train(engine, range(STEPS, 2 * STEPS))
    assert train(other, range(STEPS, 2 * STEPS)) == pytest.approx(expected, rel=1e-5)
    other.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_flat_optimizer_with_other_shapes_is_refused(stage: int) -> None:
    with pytest.raises(ConfigError, match=r"Flat has the attribute elementwise.*'count'"):
        engine_of(stage, Flat)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            FlatNumbered,
            "in the digits of a float, got 'peak' 1.0 and 2.0",
        ),
        (Sized, "the same numbers .*, got 'numel' 8.0 and"),
        (Seeded, "in the digits of a float, got 'seed' 1.15.*e.18 and 1152921504606846977;"),
        (Named, "tensors of their shape and numbers, got 'phase' of str"),
        (Listed, "tensors of their shape and numbers, got 'history' of list"),
    ],
)
def test_flat_optimizer_with_uncommon_numbers_is_refused(
    kind: type[torch.optim.Optimizer], expected: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"initialize.*(?s:.*){kind.__name__} has the .*{expected}"
    ):
        engine_of(1, kind)


@pytest.mark.parametrize("stage", [1, 3])
def test_unstorable_states_are_refused_before_training(stage: int) -> None:
    with pytest.raises(ConfigError, match=r"Odd must keep tensors.*'owner' of object"):
        engine_of(stage, Odd)


def test_unstorable_group_options_are_refused() -> None:
    module = model()
    groups = [
        {
            "params": list(module[0].parameters()),
            "decay": lambda step: 0.9**step,
            "type": torch.float32,
        },
        {"params": list(module[2].parameters()), "owner": object(), "names": ("a", "b")},
    ]
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for arguments in (
        {"optimizer": torch.optim.SGD(groups, lr=0.1)},
        {"model_parameters": groups},
    ):
        with pytest.raises(ConfigError) as caught:
            zerotrial.initialize(model=module, config=config, **arguments)
        assert caught.value.problems == [
            "parameter group 0: no checkpoint can hold 'decay' (function)",
            "parameter group 1: no checkpoint can hold 'owner' (object)",
        ]


def wide_engine_of(
    stage: int, kind: type[Later], value: Any, at: int, numel: int, **zero: Any
) -> Any:
    module = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4), nn.Linear(4, 1025))
    return zerotrial.initialize(
        model=module,
        optimizer=kind(module.parameters(), value, at, numel),
        config={"train_batch_size": 2, "zero_optimization": {"stage": stage, **zero}},
    )[0]


@pytest.mark.parametrize(("at", "numel"), [(2, 0), (1, 4096), (3, 4096)])
@pytest.mark.parametrize("stage", [1, 3])
def test_late_unstorable_states_are_found_before_training(stage: int, at: int, numel: int) -> None:
    with pytest.raises(ConfigError, match=r"FlatLater has the attribute .*'late' of shape \(3,\)"):
        wide_engine_of(stage, FlatLater, torch.zeros(3), at, numel)
    with pytest.raises(ConfigError, match=r"Later must keep tensors.*'late' of range"):
        wide_engine_of(
            stage, Later, range(3), at, numel // 4
        )  # the largest is tried cut to 4 x 512


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (FlatLater, torch.zeros(3), "FlatLater has the attribute elementwise.*'late' of shape"),
        (Later, range(3), "Later must keep tensors.*'late' of range"),
    ],
)
def test_unstorable_state_of_fifth_step_is_refused(
    tmp_path: Path, device: str, stage: int, kind: type[Later], value: Any, expected: str
) -> None:
    offload = {"device": device} | ({"nvme_path": str(tmp_path)} if device == "nvme" else {})
    engine = wide_engine_of(stage, kind, value, 5, 0, offload_optimizer=offload)
    train(engine, range(4))
    expected = (
        "must be cpu or none for .*Later.*'late'" if device == "nvme" else f"step.*{expected}"
    )
    with pytest.raises(ConfigError, match=f"(?s){expected}"):
        train(engine, range(1))
    engine.close()


def test_state_that_becomes_unstorable_is_not_saved(
    tmp_path: Path,
) -> None:
    engine = engine_of(1, Turning)
    train(engine, range(6))
    with pytest.raises(ConfigError, match=r"save_checkpoint.*(?s:.*)'turn' of object"):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.glob("global_step*"))
    train(engine, range(6, 7))
    with pytest.raises(ConfigError, match=r"optimizer\.step.*(?s:.*)'turn' of object"):
        train(engine, range(7, 8))
    engine.close()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (FlatSlow, r"elementwise(?s:.*)got the key 'shared'; without the attribute"),
        (Owned, r"got 'owner' of object"),
        (Keyed, r"under texts and numbers, got the key \(1, 2\)"),
    ],
)
def test_unstorable_common_keys_are_refused(
    kind: type[torch.optim.Optimizer], expected: str
) -> None:
    with pytest.raises(ConfigError, match=f"initialize.*(?s:.*){kind.__name__} .*{expected}"):
        engine_of(1, kind)


def test_late_tensor_of_flat_part_is_refused() -> None:
    class Growing(FlatLater):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            self.late = torch.zeros_like(self.param_groups[0]["params"][0])
            super().step()

    with pytest.raises(ConfigError, match=r"initialize(?s:.*)as a load does, got 'late'"):
        wide_engine_of(1, Growing, None, 2, 0)
    engine = wide_engine_of(1, Growing, None, 5, 0)
    train(engine, range(4))
    with pytest.raises(ConfigError, match=r"optimizer\.step(?s:.*)got 'late' later"):
        train(engine, range(1))
    engine.close()


def test_late_states_do_not_fit_another_optimizer(tmp_path: Path) -> None:
    engine = engine_of(1, Slow)
    train(engine, range(STEPS))
    engine.save_checkpoint(tmp_path)
    engine.close()
    other = engine_of(1, Numbered)
    with pytest.raises(CheckpointError, match="keeps no states, the checkpoint has mean"):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert "shared" not in other.optimizer.state
    other.close()


@pytest.mark.parametrize("kind", [Odd, Configured])
@pytest.mark.parametrize("stage", [1, 3])
def test_model_is_unchanged_after_refused_optimizer(
    stage: int, kind: type[torch.optim.Optimizer]
) -> None:
    module = model()
    config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}}
    with pytest.raises(ConfigError, match="'owner' of object"):
        zerotrial.initialize(model=module, optimizer=kind(module.parameters()), config=config)
    torch.testing.assert_close(module.state_dict(), model().state_dict())
    optimizer = Factored(module.parameters())
    engine = zerotrial.initialize(model=module, optimizer=optimizer, config=config)[0]
    train(engine, range(1))
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_files_refuse_other_shapes(tmp_path: Path, stage: int) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    with pytest.raises(ConfigError, match="must be cpu or none for Factored"):
        engine_of(stage, offload_optimizer=offload)
    engine = engine_of(stage, Slow, offload_optimizer=offload)
    with pytest.raises(ConfigError, match="none for Slow, which keeps 'shared' under keys that"):
        train(engine, range(1))
    engine.close()


def test_user_class_on_flat_parts_is_not_stepped() -> None:
    steps = []

    class Counting(Mostly):
        def step(self, closure: Any = None) -> Any:
            steps.append(self.state)
            return super().step(closure)

    module = model()
    optimizer = Counting(module.parameters(), lr=0.1, momentum=0.9)
    engine = zerotrial.initialize(
        model=module,
        optimizer=optimizer,
        config={"train_batch_size": 2, "zero_optimization": {"stage": 1}},
    )[0]
    assert not optimizer.state
    assert all(state is not optimizer.state for state in steps)
    engine.close()


def test_states_of_other_shapes_do_not_fit(tmp_path: Path) -> None:
    engine = engine_of(1)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path)
    other = zerotrial.initialize(
        model=model(),
        config={
            "train_batch_size": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        },
    )[0]
    with pytest.raises(CheckpointError, match="must keep count, factors, scale"):
        other.load_checkpoint(tmp_path)
    engine.close()
    other.close()
