"""Reading and writing full tensors of an engine; engines without an optimizer."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerotrial
from tests.engine.builder.test_second_engine import LR, Net, inputs
from tests.engine.ranks import run_on_ranks
from zerolab.errors import EngineError

pytestmark = pytest.mark.processes

STAGES = (0, 1, 2, 3)
WIDE = inputs(0) @ torch.ones(5, 7)
NAMES = ("first.weight", "blocks.1.inner.bias", "tied.weight")


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, **more}


def adam(stage: int, **more: Any) -> dict[str, Any]:
    return config(stage, optimizer={"type": "AdamW", "params": {"lr": LR}}, **more)


def own_inputs(step: int, rank: int) -> Tensor:
    return inputs(10 * step + rank)


class Plain:
    """The same model in one process, on the data of both ranks."""

    def __init__(self) -> None:
        self.model = Net()
        self.parameters = dict(self.model.named_parameters())
        trained = [p for p in self.parameters.values() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)

    def backward(self, step: int) -> None:
        loss = sum((self.model(own_inputs(step, rank)) for rank in range(2)), torch.zeros(())) / 2
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert actual is not None
    torch.testing.assert_close(actual.float(), expected, rtol=1e-5, atol=1e-7)


def read_and_write(stage: int) -> bool:
    """Train two steps; look at everything; write everything; train on; look again."""
    rank = dist.get_rank()
    plain = Plain()
    engine, *_ = zerotrial.initialize(model=Net(), config=adam(stage))

    def backward(step: int) -> None:
        plain.backward(step)
        engine.backward(engine(own_inputs(step, rank)))

    assert engine.full("first.weight", "gradient") is None
    for step in range(3):
        backward(step)
        for name in NAMES:
            close(engine.full(name, "gradient"), plain.parameters[name].grad)
        if step == 2:
            doubled = plain.parameters["tied.weight"].grad * 2
            plain.parameters["tied.weight"].grad = doubled
            engine.set_full("again.weight", doubled, "gradient")  # by its other name
            close(engine.full("tied.weight", "gradient"), doubled)
        plain.step()
        engine.step()
    for name in NAMES:
        parameter = plain.parameters[name]
        close(engine.full(name), parameter)
        close(engine.full(name, "exp_avg_sq"), plain.optimizer.state[parameter]["exp_avg_sq"])
    close(engine.full("scale.weight"), plain.parameters["scale.weight"])  # frozen

    for name in (*NAMES, "scale.weight"):
        with torch.no_grad():
            plain.parameters[name].mul_(0.5)
        engine.set_full(name, plain.parameters[name].detach())
        close(engine.full(name), plain.parameters[name])
    moment = plain.optimizer.state[plain.parameters["first.weight"]]["exp_avg"]
    moment.add_(1.0)
    engine.set_full("first.weight", moment, "exp_avg")
    backward(3)
    plain.step()
    engine.step()
    with engine.gathered(["tied.weight"]), torch.no_grad():
        close(engine.module.tied.weight, plain.parameters["tied.weight"])
        if rank == 0:  # on its own: nothing is gathered within
            close(engine.module.again(WIDE), plain.model.again(WIDE))
    with engine.gathered(["again.weight"], modifier_rank=1), torch.no_grad():
        if rank == 1:
            engine.module.tied.weight.fill_(0.25)
    with torch.no_grad():
        plain.parameters["tied.weight"].fill_(0.25)
    state = engine.full_state_dict()
    assert bool(state) == (rank == 0)
    if rank == 0:
        expected = plain.model.state_dict()
        assert state.keys() == expected.keys()  # tied ones under both names
        for name, value in expected.items():
            close(state[name], value)
    for call, message in (
        (lambda: engine.full("tied.wieght"), "no parameter 'tied.wieght'; did you mean"),
        (lambda: engine.set_full("first.weight", torch.ones(2)), r"tensor \(7, 5\), got \(2,\)"),
        (
            lambda: engine.set_full("first.weight", moment, "momentum"),
            "one of weight, gradient, exp_avg, exp_avg_sq for first.weight, got 'momentum'",
        ),
        (lambda: engine.set_full("first.weight", moment, "gradient"), "no gradient now"),
        (lambda: engine.full("scale.weight", "gradient"), None),
    ):
        if message is None:
            assert call() is None
        else:
            with pytest.raises(EngineError, match=message):
                call()
    engine.close()
    return True


def read_within_a_window(stage: int) -> bool:
    """Between two micro-batches a gradient is the sum so far."""
    plain = Plain()
    file = adam(stage, gradient_accumulation_steps=2)
    engine, *_ = zerotrial.initialize(model=Net(), config=file)
    plain.backward(0)
    engine.backward(engine(own_inputs(0, dist.get_rank())))
    engine.step()
    expected = plain.parameters["first.weight"].grad
    assert expected is not None
    close(engine.full("first.weight", "gradient"), expected / 2)
    engine.backward(engine(own_inputs(1, dist.get_rank())))
    plain.backward(1)
    close(engine.full("first.weight", "gradient"), expected / 2)
    engine.step()
    engine.close()
    return True


def write_one_element(stage: int) -> bool:
    """A change on one rank in bf16 keeps the last bits of all other masters."""
    engine, *_ = zerotrial.initialize(model=Net(), config=adam(stage, bf16={"enabled": True}))
    engine.backward(engine(own_inputs(0, dist.get_rank())))
    engine.step()
    before = engine.full("first.weight")
    assert before is not None
    assert not before.equal(before.bfloat16().float())
    with engine.gathered(["first.weight"], modifier_rank=0), torch.no_grad():
        if dist.get_rank() == 0:
            engine.module.first.weight[0, 0] = 7.0
    before[0, 0] = 7.0
    after = engine.full("first.weight")
    engine.close()
    return after is not None and after.equal(before)


def evaluate(stage: int) -> list[float]:
    """Without an optimizer, from rank 0's weights."""
    losses = []
    for more in ({}, {"bf16": {"enabled": True}}):
        model = Net()
        for parameter in model.parameters() if dist.get_rank() else ():
            parameter.data.zero_()
        engine, optimizer, *_ = zerotrial.initialize(model=model, config=config(stage, **more))
        assert optimizer is None
        with torch.no_grad():
            losses.append(engine.eval()(inputs(0)).item())
        count = sum(
            len(tensors) for kind, tensors in engine.stage.tensors_by_kind().items() if kind in HELD
        )
        assert count == 0, engine.stage.tensors_by_kind()
        full = engine.full("first.weight")
        assert full is not None
        close(full, Net().first.weight.to(full.dtype).float())
        with pytest.raises(EngineError, match="has no optimizer and is for evaluation; set optim"):
            engine.backward(torch.zeros((), requires_grad=True))
        with pytest.raises(EngineError, match=r"step\(\): this engine has no optimizer"):
            engine.step()
        engine.close()
        assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    return losses


HELD = ("gradients", "optimizer", "master")


def all_of_them() -> list[list[float]]:
    for stage in STAGES:
        assert read_and_write(stage)
        assert read_within_a_window(stage)
        assert write_one_element(stage)
    return [evaluate(stage) for stage in STAGES]


def test_full_tensors_read_and_write_at_every_stage() -> None:
    with torch.no_grad():
        expected = Net()(inputs(0)).item()
    for losses in run_on_ranks(all_of_them, 2):
        for plain, half in losses:
            assert plain == pytest.approx(expected, rel=1e-6)
            assert half == pytest.approx(expected, rel=2e-2)
