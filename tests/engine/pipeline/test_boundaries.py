"""What passes a stage boundary is what the next layer would get without one, or it is told."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerotrial
from tests.engine.ranks import run_on_ranks
from zerolab.errors import ConfigError
from zerotrial.engine.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from zerotrial.engine.pipeline.module import built_whole

pytestmark = pytest.mark.processes

RANKS, WIDTH, MICRO, COUNT, LR = 2, 6, 4, 2, 0.1
SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2)]

Layers = Callable[[], list[Any]]


class Chosen(nn.Module):
    """Gives with what it computes the places of the samples that count."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mix(x), (x[:, 0] > 0).nonzero()[:, 0]


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        x, places = value
        return self.mix(x[places])  # type: ignore[no-any-return]


class Wrapped(nn.Module):
    """Takes and gives a tensor in a tuple, or a list, and computes by which it is."""

    def __init__(self, form: type) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.form = form

    def forward(self, value: Any) -> Any:
        factor = {Tensor: 1.0, tuple: 0.5, list: 2.0}[type(value)]
        x = value if isinstance(value, Tensor) else value[0]
        return self.form((torch.tanh(self.mix(x)) * factor,))


class Uses(nn.Module):
    """A layer of its own that uses the weight of another."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Normed(nn.Module):
    def __init__(self, *, moves: bool = True) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=moves)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.mix(x))) * self.scale  # type: ignore[no-any-return]


def square(output: Any, labels: Tensor) -> Tensor:
    x = output if isinstance(output, Tensor) else output[0]
    return (x - labels[: len(x)]).square().mean()


def linears() -> list[Any]:
    return [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]


def tied(*, moves: bool, places: tuple[int, int] = (0, 3)) -> list[Any]:
    layers = linears()
    for place in places:
        layers[place] = TiedLayerSpec("n", Normed, moves=moves, tied_weight_attr="mix.weight")
    return layers


def build(layers: Layers, stages: int, chunks: int = 1) -> PipelineModule:
    torch.manual_seed(0)
    return PipelineModule(
        layers(),
        num_stages=stages,
        loss_fn=square,
        partition_method="uniform",
        seed_layers=True,
        chunks=chunks,
    )


@contextmanager
def engine_of(layers: Layers, schedule: str = "1f1b", chunks: int = 1) -> Iterator[Any]:
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": COUNT,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "pipeline": {"schedule": schedule},
    }
    engine = zerotrial.initialize(model=build(layers, RANKS, chunks), config=config)[0]
    yield engine
    engine.close()


def batch(step: int, counted: int = MICRO) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches in each of which the first samples count."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(COUNT):
        x = torch.randn(MICRO, WIDTH, generator=generator)
        x[:, 0] = torch.where(torch.arange(MICRO) < counted, 1.0, -1.0)
        found.append((x, x.flip(1)))
    return found


def losses_of(engine: Any) -> list[float]:
    found = [float(engine.train_batch(iter(batch(step)))) for step in range(3)]
    return [*found, float(engine.eval_batch(iter(batch(3))))]


def plain(layers: Layers, before: Callable[[Any, int], None] = lambda _, step: None) -> list[float]:
    """Train in one process; returns the losses and one of evaluation."""
    with built_whole():
        model = build(layers, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    found = []
    for step in range(3):
        before(model, step)
        losses = [square(model(x), wanted) / COUNT for x, wanted in batch(step)]
        sum(losses, torch.zeros(())).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(sum(losses).detach()))  # type: ignore[union-attr]
    model.eval()
    with torch.no_grad():
        found.append(sum(float(square(model(x), wanted)) / COUNT for x, wanted in batch(3)))
    return found


def thaw_first(module: nn.Module, step: int) -> None:
    """Freeze the first stage, and let it train from the second batch on; then freeze it again."""
    for name, parameter in module.named_parameters():
        if name.startswith(("layers.0.", "layers.1.")):
            parameter.requires_grad_(step == 1)


def heard(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - is what is asked for
        return f"{type(error).__name__}: {error}"
    return "nothing"


def sizes(schedule: str, chunks: int) -> dict[str, Any]:
    def layers() -> list[Any]:
        return [LayerSpec(Chosen), LayerSpec(Choice), *linears()[: 2 * chunks - 2]]

    with engine_of(layers, schedule, chunks) as engine:
        found: dict[str, Any] = {"first": float(engine.train_batch(iter(batch(0, 2))))}
        before = [weight.clone() for _, weight in engine.stage.full_weights()]
        for what, counted in (("fewer", 1), ("more", 4)):
            engine.train_batch(iter(batch(1, 2)))  # plans for two
            before = [weight.clone() for _, weight in engine.stage.full_weights()]
            found[what] = heard(lambda counted=counted: engine.train_batch(iter(batch(2, counted))))
            after = [weight for _, weight in engine.stage.full_weights()]
            found[f"{what} kept"] = all(map(torch.equal, before, after))
    return found


def forms(form: type, schedule: str, chunks: int) -> list[float]:
    with engine_of(lambda: [LayerSpec(Wrapped, form) for _ in range(4)], schedule, chunks) as one:
        return losses_of(one)


def thawed(schedule: str, chunks: int) -> list[float]:
    found = []
    with engine_of(linears, schedule, chunks) as engine:
        for step in range(3):
            thaw_first(engine.module, step)
            found.append(float(engine.train_batch(iter(batch(step)))))
        return [*found, float(engine.eval_batch(iter(batch(3))))]


def unseen() -> list[Any]:
    """Layers whose common weight only the rank sees that builds the last of them."""
    first = nn.Linear(WIDTH, WIDTH)
    return [first, *linears()[:2], LayerSpec(Uses, first.weight)]


def ties() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with engine_of(lambda: tied(moves=True)) as engine:
        found["moving"] = heard(lambda: engine.train_batch(iter(batch(0))))
        for layer in engine.module.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.eval()
        found["still"] = heard(lambda: engine.train_batch(iter(batch(0))))
    with engine_of(lambda: tied(moves=False)) as engine:
        found["none"] = losses_of(engine)
    with engine_of(lambda: tied(moves=True, places=(0, 1))) as engine:
        found["one stage"] = heard(lambda: engine.train_batch(iter(batch(0))))
    return found


def everything() -> dict[Any, Any]:
    found: dict[Any, Any] = {"ties": ties()}
    found["unseen"] = heard(lambda: engine_of(unseen).__enter__())
    for way in SCHEDULES:
        found["sizes", way] = sizes(*way)
        found["thawed", way] = thawed(*way)
        for form in (tuple, list):
            found[form, way] = forms(form, *way)
    return found


@pytest.fixture(scope="module")
def answers() -> list[dict[Any, Any]]:
    return run_on_ranks(everything, RANKS)


@pytest.mark.parametrize("way", SCHEDULES, ids=str)
def test_a_tensor_whose_size_follows_from_values_is_told_on_all_ranks(
    answers: list[dict[Any, Any]], way: tuple[str, int]
) -> None:
    for what, counted in (("fewer", 1), ("more", 4)):
        for rank, answer in enumerate(answers):
            found = answer["sizes", way]
            text = found[what]
            assert text.startswith("EngineError: ")
            assert "layers[0] (Chosen), the last of pipeline stage 0, must give the same" in text
            planned = f"planned was a tuple of [{MICRO}, {WIDTH}] float32 with gradient, [2] int64"
            assert planned in text
            assert f"float32 with gradient, [{counted}] int64. Pass on" in text
            assert ("rank 0 (pipeline stage 0), micro-batch 0" in text) == (rank == 1)
            assert found[f"{what} kept"]


@pytest.mark.parametrize("form", [tuple, list])
@pytest.mark.parametrize("way", SCHEDULES, ids=str)
def test_one_tensor_in_a_tuple_or_a_list_stays_in_it_over_a_cut(
    answers: list[dict[Any, Any]], way: tuple[str, int], form: type
) -> None:
    wanted = plain(lambda: [LayerSpec(Wrapped, form) for _ in range(4)])
    for answer in answers:
        assert answer[form, way] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("way", SCHEDULES, ids=str)
def test_weights_may_be_frozen_and_thawed_between_batches(
    answers: list[dict[Any, Any]], way: tuple[str, int]
) -> None:
    wanted = plain(linears, thaw_first)
    for answer in answers:
        assert answer["thawed", way] == pytest.approx(wanted, rel=1e-5)


def test_a_weight_that_two_layers_share_is_told_on_all_ranks(answers: list[dict[Any, Any]]) -> None:
    for answer in answers:
        assert answer["unseen"].startswith("ConfigError: PipelineModule(): 1 problem(s)")
        assert "layers[3]: must have parameters of its own, got weight, which" in answer["unseen"]
        assert "TiedLayerSpec" in answer["unseen"]


def test_a_module_or_a_parameter_at_two_places_is_refused() -> None:
    one, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    alike = nn.Linear(WIDTH, WIDTH)
    alike.weight = other.weight
    with pytest.raises(ConfigError) as caught:
        PipelineModule([one, nn.Tanh(), other, one, alike], num_stages=1)
    first, second = caught.value.problems
    assert first.startswith("layers[3]: must have parameters of its own, got weight, which is wei")
    assert "weight of layers[0] too" in first
    assert second.startswith("layers[4]: ")
    assert "weight of layers[2] too" in second


def test_a_module_without_trained_parameters_may_stand_at_two_places() -> None:
    again = nn.ReLU()
    fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
    within = nn.Linear(WIDTH, WIDTH)
    own = nn.Sequential(within, within)  # one layer may use what it has as it likes
    model = PipelineModule([own, again, fixed, again, fixed], num_stages=1)
    assert model(torch.ones(2, WIDTH)).shape == (2, WIDTH)


def test_buffers_of_which_stages_would_have_different_copies_are_refused(
    answers: list[dict[Any, Any]],
) -> None:
    wanted = plain(lambda: tied(moves=False))
    for answer in answers:
        found = answer["ties"]
        assert found["moving"].startswith("EngineError: ")
        assert "TiedLayerSpec('n'): must have no buffers that a forward changes" in found["moving"]
        assert "norm.running_mean, norm.running_var" in found["moving"]
        assert "scale" not in found["moving"]
        assert found["still"] == found["one stage"] == "nothing"
        assert found["none"] == pytest.approx(wanted, rel=1e-5)
