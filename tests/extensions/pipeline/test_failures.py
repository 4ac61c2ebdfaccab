"""An exception on one rank of a pipeline is reported on all ranks, and training continues."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerotrial
from tests.engine.pipelines import MICRO, SAMPLES, config_of
from tests.engine.ranks import run_on_ranks
from zerotrial.extensions.pipeline import LayerSpec, PipelineModule

pytestmark = pytest.mark.processes

RANKS, WIDTH, BATCHES = 4, 4, 4
LAYOUTS = [(2, 1, "1f1b", 1), (4, 0, "gpipe", 1), (2, 2, "zero-bubble", 2), (1, 2, "1f1b", 1)]
"""Pipeline stages, ZeRO stage, schedule, chunks on each rank; the other ranks are replicas."""


class Torn(torch.autograd.Function):
    """Lets everything pass forward, and raises backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise OSError("torn\nand more lines")


class Fragile(nn.Module):
    """Layer that counts its inputs and raises on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.breaks = ""
        self.left = 0

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.breaks == "forward" and self.left < 0:
            raise ValueError("the layer broke")
        mixed = self.mix(x)
        if self.breaks == "backward" and self.left < 0:
            mixed = Torn.apply(mixed)
        return x + torch.tanh(self.norm(mixed))


class Loss:
    """Loss that raises on demand."""

    def __init__(self) -> None:
        self.broken = False

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        if self.broken:
            raise StopIteration
        return (output - labels).square().mean()


def batch(engine: Any, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + engine.mesh.data.rank)
    count = engine.gradient_accumulation_steps()
    for part in torch.randn(count * MICRO, WIDTH, generator=generator).split(MICRO):
        yield part, part.flip(0)


def make_engine(stages: int, stage: int, schedule: str, chunks: int) -> Any:
    torch.manual_seed(0)
    specs = [LayerSpec(Fragile) for _ in range(6)]
    model = PipelineModule(specs, num_stages=stages, loss_fn=Loss(), chunks=chunks)
    return zerotrial.initialize(model=model, config=config_of(stage, schedule))[0]


def state_of(engine: Any) -> dict[str, Tensor]:
    weights = {name: weight.clone() for name, weight in engine.stage.full_weights()}
    return weights | {name: value.clone() for name, value in engine.module.named_buffers()}


def break_layer(engine: Any, how: str, at: tuple[int, int], count: int) -> None:
    """Let a layer of one rank raise.

    Args:
        engine: Of this rank.
        how: ``forward``, ``backward``, or nothing to mend it.
        at: Pipeline stage and replica of the rank.
        count: Calls that go well before.
    """
    if (engine.stage_id, engine.mesh.data.rank) == at:
        layer = next(iter(engine.module.layers.values()))
        layer.breaks, layer.left = how, count


def heard(call: Callable[[], Any]) -> tuple[str, str, str]:
    """Return the exception of a call: its type, text and notes."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - returned for the assertion
        return type(error).__name__, str(error), " ".join(getattr(error, "__notes__", ()))
    return "nothing", "", ""


def suffer(layout: tuple[int, int, str, int]) -> dict[str, Any]:
    """Train as if nothing had happened, with a failure of another kind before each batch."""
    engine, errors = make_engine(*layout), {}
    last, loss = engine.num_stages - 1, engine.module.loss_fn
    replica = engine.mesh.data.size - 1

    def train(step: int) -> Callable[[], Any]:
        return lambda: engine.train_batch(batch(engine, step))

    second, looks = min(1, last), int(last > 0)  # a schedule looks at the shapes first
    break_layer(engine, "forward", (second, 0), 0)  # before anything has run
    errors["first"] = heard(train(0))
    break_layer(engine, "", (second, 0), 0)
    train(0)()
    break_layer(engine, "forward", (last, replica), 1)
    errors["forward"] = heard(train(50))
    break_layer(engine, "", (last, replica), 0)
    break_layer(engine, "backward", (0, 0), 1 + looks)
    errors["backward"] = heard(train(51))
    break_layer(engine, "", (0, 0), 0)
    train(1)()
    loss.broken = engine.stage_id == last and engine.mesh.data.rank == replica
    errors["loss"] = heard(train(52))
    errors["evaluation"] = heard(lambda: engine.eval_batch(batch(engine, 52)))
    loss.broken = False
    train(2)()
    is_bad = (engine.stage_id, engine.mesh.data.rank) == (0, replica)
    bad: Iterator[Any] = iter([3]) if is_bad else batch(engine, 53)
    errors["data"] = heard(lambda: engine.train_batch(bad))
    few = list(batch(engine, 54))
    short = few[1:] if engine.mesh.data.rank == replica else few
    errors["end"] = heard(lambda: engine.train_batch(iter(short)))
    train(3)()
    result = {"said": errors, "state": state_of(engine), "rank": replica}
    result["counted"] = engine.global_steps, engine.micro_steps, engine.skipped_steps
    engine.close()
    return result


def undisturbed(layout: tuple[int, int, str, int]) -> dict[str, Tensor]:
    engine = make_engine(*layout)
    for step in range(BATCHES):
        engine.train_batch(batch(engine, step))
    state = state_of(engine)
    engine.close()
    return state


def all_cases() -> dict[Any, Any]:
    return {layout: (suffer(layout), undisturbed(layout)) for layout in LAYOUTS}


@pytest.fixture(scope="module")
def results() -> list[dict[Any, Any]]:
    return run_on_ranks(all_cases, RANKS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_failure_is_reported_on_all_ranks(
    results: list[dict[Any, Any]], layout: tuple[int, int, str, int]
) -> None:
    stages, replicas = layout[0], RANKS // layout[0]
    last_rank, second = RANKS - 1, min(1, stages - 1)
    expected = {  # the failed rank, its exception, and the error of the others
        "first": (
            replicas * second,
            "ValueError",
            f"{second}), micro-batch 0: ValueError: the layer broke.",
        ),
        "forward": (last_rank, "ValueError", f"{stages - 1}), micro-batch 1: ValueError: the"),
        "backward": (0, "OSError", "0), micro-batch 1: OSError: torn. All ranks"),
        "loss": (last_rank, "EngineError", f"{stages - 1}), micro-batch 0: StopIteration"),
        "evaluation": (last_rank, "EngineError", f"{stages - 1}), micro-batch 0: StopIteration"),
        "data": (replicas - 1, "EngineError", "0), micro-batch 0: EngineError: data_iter: must"),
    }
    for rank, rank_result in enumerate(results):
        errors = rank_result[layout][0]["said"]
        for case, (failed, kind, cause) in expected.items():
            error_kind, text, notes = errors[case]
            assert error_kind == (kind if rank == failed else "EngineError"), case
            message = text + notes
            assert f"rank {failed} (pipeline stage {cause}" in message, case
            assert "weights are unchanged, and the engine can continue" in message, case
        assert errors["end"][0] == "StopIteration"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_failed_batch_leaves_no_trace(
    results: list[dict[Any, Any]], layout: tuple[int, int, str, int]
) -> None:
    for rank_result in results:
        actual, expected = rank_result[layout]
        assert actual["state"].keys() == expected.keys()
        for name, value in actual["state"].items():
            assert torch.equal(value, expected[name]), name
        micro_batches = SAMPLES // MICRO // (RANKS // layout[0])
        assert actual["counted"] == (BATCHES, BATCHES * micro_batches, 0)
