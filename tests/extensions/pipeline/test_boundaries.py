"""Values across stage boundaries equal those of a plain model or raise an error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerotrial
from tests.engine.ranks import run_on_ranks
from zerolab.errors import ConfigError
from zerotrial.engine.builder.environment import planning
from zerotrial.extensions.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

pytestmark = pytest.mark.processes

RANKS, WIDTH, MICRO, COUNT, LR = 2, 6, 4, 2, 0.1
SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2)]

Layers = Callable[[], list[Any]]


class Chosen(nn.Module):
    """Layer that also returns the indices of relevant samples."""

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
    """Layer with a tensor in a tuple or list, whose result depends on the type."""

    def __init__(self, form: type) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.form = form

    def forward(self, value: Any) -> Any:
        factor = {Tensor: 1.0, tuple: 0.5, list: 2.0}[type(value)]
        x = value if isinstance(value, Tensor) else value[0]
        return self.form((torch.tanh(self.mix(x)) * factor,))


class Uses(nn.Module):
    """Layer that uses another layer's weight."""

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
    for index in places:
        layers[index] = TiedLayerSpec("n", Normed, moves=moves, tied_weight_attr="mix.weight")
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
    """Micro-batches with a mask of their first samples."""
    generator = torch.Generator().manual_seed(step)
    micro_batches = []
    for _ in range(COUNT):
        x = torch.randn(MICRO, WIDTH, generator=generator)
        x[:, 0] = torch.where(torch.arange(MICRO) < counted, 1.0, -1.0)
        micro_batches.append((x, x.flip(1)))
    return micro_batches


def losses_of(engine: Any) -> list[float]:
    losses = [float(engine.train_batch(iter(batch(step)))) for step in range(3)]
    return [*losses, float(engine.eval_batch(iter(batch(3))))]


def plain(layers: Layers, before: Callable[[Any, int], None] = lambda _, step: None) -> list[float]:
    """Train in one process; returns the losses and one of evaluation."""
    with planning(lambda *_: None):
        model = build(layers, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    result = []
    for step in range(3):
        before(model, step)
        losses = [square(model(x), target) / COUNT for x, target in batch(step)]
        sum(losses, torch.zeros(())).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        result.append(float(sum(losses).detach()))  # type: ignore[union-attr]
    model.eval()
    with torch.no_grad():
        result.append(sum(float(square(model(x), target)) / COUNT for x, target in batch(3)))
    return result


def thaw_first(module: nn.Module, step: int) -> None:
    """Freeze the first stage, and let it train from the second batch on; then freeze it again."""
    for name, parameter in module.named_parameters():
        if name.startswith(("layers.0.", "layers.1.")):
            parameter.requires_grad_(step == 1)


def heard(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - returned for the assertion
        return f"{type(error).__name__}: {error}"
    return "nothing"


def sizes(schedule: str, chunks: int) -> dict[str, Any]:
    def layers() -> list[Any]:
        return [LayerSpec(Chosen), LayerSpec(Choice), *linears()[: 2 * chunks - 2]]

    with engine_of(layers, schedule, chunks) as engine:
        losses: dict[str, Any] = {"first": float(engine.train_batch(iter(batch(0, 2))))}
        before = [weight.clone() for _, weight in engine.stage.full_weights()]
        for what, counted in (("fewer", 1), ("more", 4)):
            engine.train_batch(iter(batch(1, 2)))  # plans for two
            before = [weight.clone() for _, weight in engine.stage.full_weights()]
            losses[what] = heard(
                lambda counted=counted: engine.train_batch(iter(batch(2, counted)))
            )
            after = [weight for _, weight in engine.stage.full_weights()]
            losses[f"{what} kept"] = all(map(torch.equal, before, after))
    return losses


def forms(form: type, schedule: str, chunks: int) -> list[float]:
    with engine_of(
        lambda: [LayerSpec(Wrapped, form) for _ in range(4)], schedule, chunks
    ) as engine:
        return losses_of(engine)


def thawed(schedule: str, chunks: int) -> list[float]:
    losses = []
    with engine_of(linears, schedule, chunks) as engine:
        for step in range(3):
            thaw_first(engine.module, step)
            losses.append(float(engine.train_batch(iter(batch(step)))))
        return [*losses, float(engine.eval_batch(iter(batch(3))))]


def unseen() -> list[Any]:
    """Layers whose common weight is visible only on the last stage."""
    first = nn.Linear(WIDTH, WIDTH)
    return [first, *linears()[:2], LayerSpec(Uses, first.weight)]


def ties() -> dict[str, Any]:
    results: dict[str, Any] = {}
    with engine_of(lambda: tied(moves=True)) as engine:
        results["moving"] = heard(lambda: engine.train_batch(iter(batch(0))))
        for layer in engine.module.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.eval()
        results["still"] = heard(lambda: engine.train_batch(iter(batch(0))))
    with engine_of(lambda: tied(moves=False)) as engine:
        results["none"] = losses_of(engine)
    with engine_of(lambda: tied(moves=True, places=(0, 1))) as engine:
        results["one stage"] = heard(lambda: engine.train_batch(iter(batch(0))))
    return results


def all_cases() -> dict[Any, Any]:
    results: dict[Any, Any] = {"ties": ties()}
    results["unseen"] = heard(lambda: engine_of(unseen).__enter__())
    for way in SCHEDULES:
        results["sizes", way] = sizes(*way)
        results["thawed", way] = thawed(*way)
        for form in (tuple, list):
            results[form, way] = forms(form, *way)
    return results


@pytest.fixture(scope="module")
def rank_results() -> list[dict[Any, Any]]:
    return run_on_ranks(all_cases, RANKS)


@pytest.mark.parametrize("way", SCHEDULES, ids=str)
def test_value_dependent_size_is_reported_on_all_ranks(
    rank_results: list[dict[Any, Any]], way: tuple[str, int]
) -> None:
    for what, counted in (("fewer", 1), ("more", 4)):
        for rank, rank_result in enumerate(rank_results):
            message = rank_result["sizes", way]
            text = message[what]
            assert text.startswith("EngineError: ")
            assert "layers[0] (Chosen), the last of pipeline stage 0, must give the same" in text
            planned = f"planned was a tuple of [{MICRO}, {WIDTH}] float32 with gradient, [2] int64"
            assert planned in text
            assert f"float32 with gradient, [{counted}] int64. Pass on" in text
            assert ("rank 0 (pipeline stage 0), micro-batch 0" in text) == (rank == 1)
            assert message[f"{what} kept"]


@pytest.mark.parametrize("form", [tuple, list])
@pytest.mark.parametrize("way", SCHEDULES, ids=str)
def test_tuple_or_list_of_one_crosses_a_boundary(
    rank_results: list[dict[Any, Any]], way: tuple[str, int], form: type
) -> None:
    expected = plain(lambda: [LayerSpec(Wrapped, form) for _ in range(4)])
    for rank_result in rank_results:
        assert rank_result[form, way] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("way", SCHEDULES, ids=str)
def test_weights_can_be_frozen_between_batches(
    rank_results: list[dict[Any, Any]], way: tuple[str, int]
) -> None:
    expected = plain(linears, thaw_first)
    for rank_result in rank_results:
        assert rank_result["thawed", way] == pytest.approx(expected, rel=1e-5)


def test_shared_weight_of_two_layers_is_refused(rank_results: list[dict[Any, Any]]) -> None:
    for rank_result in rank_results:
        assert rank_result["unseen"].startswith("ConfigError: PipelineModule(): 1 problem(s)")
        assert "layers[3]: must not share parameters, got weight, which" in rank_result["unseen"]
        assert "TiedLayerSpec" in rank_result["unseen"]


def test_module_or_parameter_used_twice_is_refused() -> None:
    linear, other_linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    alike = nn.Linear(WIDTH, WIDTH)
    alike.weight = other_linear.weight
    with pytest.raises(ConfigError) as caught:
        PipelineModule([linear, nn.Tanh(), other_linear, linear, alike], num_stages=1)
    first, second = caught.value.problems
    assert first.startswith("layers[3]: must not share parameters, got weight, which is wei")
    assert "weight of layers[0], too" in first
    assert second.startswith("layers[4]: ")
    assert "weight of layers[2], too" in second


def test_frozen_module_can_be_used_twice() -> None:
    again = nn.ReLU()
    fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
    within = nn.Linear(WIDTH, WIDTH)
    single = nn.Sequential(within, within)  # one layer may use its parts twice
    model = PipelineModule([single, again, fixed, again, fixed], num_stages=1)
    assert model(torch.ones(2, WIDTH)).shape == (2, WIDTH)


def test_changing_buffers_of_tied_layers_are_refused(
    rank_results: list[dict[Any, Any]],
) -> None:
    expected = plain(lambda: tied(moves=False))
    for rank_result in rank_results:
        result = rank_result["ties"]
        assert result["moving"].startswith("EngineError: ")
        assert "TiedLayerSpec('n'): must have no buffers that a forward changes" in result["moving"]
        assert "norm.running_mean, norm.running_var" in result["moving"]
        assert "scale" not in result["moving"]
        assert result["still"] == result["one stage"] == "nothing"
        assert result["none"] == pytest.approx(expected, rel=1e-5)
