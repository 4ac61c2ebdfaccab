"""Checkpoints of a pipeline: in one directory, of one model, loaded wherever it is cut."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import zerotrial
from tests.engine.pipelines import (
    WIDTH,
    WORDS,
    Block,
    Plain,
    batches,
    build,
    config_of,
    engine_of,
    full_batch,
    layers,
)
from tests.engine.ranks import RankError, run_on_ranks
from zerolab.errors import EngineError
from zerotrial.extensions.pipeline import LayerSpec, PipelineModule

pytestmark = pytest.mark.processes

RANKS, BEFORE, AFTER = 4, 3, 2

LAYOUTS = [
    (1, 3, "1f1b", 1),
    (2, 1, "1f1b", 1),
    (4, 0, "gpipe", 1),
    (2, 2, "interleaved", 2),
]
"""Pipeline stages, ZeRO stage, schedule, chunks on each rank; the other ranks are replicas."""


def steps(engine: Any, first: int, count: int) -> list[float]:
    return [
        float(engine.train_batch(batches(step, engine))) for step in range(first, first + count)
    ]


def save_all(directory: Path) -> dict[str, list[float]]:
    """Save in every layout; return the following losses."""
    losses: dict[str, list[float]] = {}
    for layout in LAYOUTS:
        engine = engine_of(*layout)
        steps(engine, 0, BEFORE)
        engine.save_checkpoint(directory / str(layout), client_state={"said": "hello"})
        losses[str(layout)] = steps(engine, BEFORE, AFTER)
        engine.export(directory / f"{layout}.safetensors")
        engine.close()
    return losses


def load_all(directory: Path) -> dict[str, Any]:
    """Load every layout's checkpoint in every layout, and train on."""
    losses: dict[str, Any] = {}
    for layout in LAYOUTS:
        engine = engine_of(*layout)
        for source in LAYOUTS:
            _, state = engine.load_checkpoint(directory / str(source))
            assert state == {"said": "hello"}
            losses[f"{source} -> {layout}"] = steps(engine, BEFORE, AFTER)
            assert engine.global_steps == BEFORE + AFTER
        engine.close()
    return losses


def load_in_plain_torch(directory: Path) -> dict[str, Tensor]:
    """Load a pipeline's checkpoint into a model that is none, and save it for one."""
    model = Plain()
    engine = zerotrial.initialize(model=model, config=config_of(1))[0]
    engine.load_checkpoint(directory / str(LAYOUTS[1]))
    engine.save_checkpoint(directory / "plain")
    weights = {name: weight.clone() for name, weight in engine.stage.full_weights()}
    engine.close()
    again = engine_of(2, 1)
    again.load_checkpoint(directory / "plain")
    for name, weight in again.stage.full_weights():
        assert torch.equal(weight, weights[name])
    again.close()
    return weights


def load_in_another_model(directory: Path) -> list[str]:
    errors = []
    for more in ([LayerSpec(Block, WIDTH)], []):
        torch.manual_seed(0)
        model = PipelineModule(
            [*layers()[:-1], *more], num_stages=2, loss_fn=lambda x, _: x.square().mean()
        )
        engine = zerotrial.initialize(model=model, config=config_of(1))[0]
        before = {name: weight.clone() for name, weight in engine.stage.full_weights()}
        with pytest.raises(EngineError) as caught:
            engine.load_checkpoint(directory / str((4, 0, "gpipe", 1)), tag="never")
        errors.append(str(caught.value))
        if more:
            with pytest.raises(EngineError) as caught:
                engine.load_checkpoint(directory / str((4, 0, "gpipe", 1)))
            errors.append(str(caught.value))
            after = dict(engine.stage.full_weights())
            assert all(torch.equal(after[name], before[name]) for name in before)
        engine.close()
    return errors


class Counting(nn.Module):
    """Has a buffer that is its own, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.mix(x) * self.scale


def keep_buffers(directory: Path) -> list[dict[str, Any]]:
    """Buffers and frozen parameters of all stages, as another cut of the model finds them."""
    values = []
    for stages in (4, 2):
        torch.manual_seed(stages)
        model = PipelineModule(
            [LayerSpec(Counting) for _ in range(4)],
            num_stages=stages,
            loss_fn=lambda x, y: (x - y).square().mean(),
        )
        engine = zerotrial.initialize(model=model, config=config_of(1))[0]
        if stages == 4:
            x = torch.ones(2, 4)
            engine.train_batch(iter([(x, x)] * 8))
            engine.save_checkpoint(directory / "buffers")
        else:
            engine.load_checkpoint(directory / "buffers")
        names = [name for name in engine.module.state_dict() if "mix" not in name]
        values.append({name: engine.module.state_dict()[name].tolist() for name in names})
        engine.close()
    return values


def all_cases(directory: Path) -> dict[str, Any]:
    return {
        "expected": save_all(directory),
        "loaded": load_all(directory),
        "plain": load_in_plain_torch(directory),
        "refused": load_in_another_model(directory),
        "buffers": keep_buffers(directory),
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results(directory: Path) -> list[dict[str, Any]]:
    return run_on_ranks(all_cases, RANKS, directory)


def test_checkpoint_resumes_in_any_layout(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert len(result["loaded"]) == len(LAYOUTS) ** 2
        expected = result["expected"]
        for name, losses in result["loaded"].items():
            assert losses == pytest.approx(expected[str(LAYOUTS[0])], abs=1e-5), name
        for layout in map(str, LAYOUTS):  # the same layout, to the last bit
            assert result["loaded"][f"{layout} -> {layout}"] == expected[layout]


def test_tied_weight_is_saved_once(results: list[dict[str, Any]], directory: Path) -> None:
    assert results
    for layout in LAYOUTS:
        files = list((directory / str(layout)).rglob("rank-*.safetensors"))
        saved: dict[str, int] = {}
        for name, value in (
            (n, v) for f in files for n, v in safetensors.torch.load_file(f).items()
        ):
            if "layers.0.weight" in name:
                kind = name.split("/")[-1]
                saved[kind] = saved.get(kind, 0) + value.numel()
        assert len(saved) == 3, saved  # the weight and two moments
        assert set(saved.values()) == {WORDS * WIDTH}, (layout, saved)


def test_plain_model_loads_pipeline_checkpoint(
    results: list[dict[str, Any]], directory: Path
) -> None:
    for result in results:
        assert set(result["plain"]) == set(Plain().state_dict())


def test_export_has_the_full_model(results: list[dict[str, Any]], directory: Path) -> None:
    assert results
    files = [safetensors.torch.load_file(directory / f"{lay}.safetensors") for lay in LAYOUTS]
    for tensors in files:
        Plain().load_state_dict(tensors)
        for name, value in tensors.items():
            torch.testing.assert_close(value, files[0][name], rtol=1e-4, atol=1e-5)


def test_checkpoint_of_another_model_is_refused(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        missing, unlike, again = result["refused"]
        assert "never: no such checkpoint" in missing
        assert "not in the checkpoint: layers.7.mix.bias" in unlike
        assert "never: no such checkpoint" in again


def test_buffers_and_frozen_parameters_are_saved(
    results: list[dict[str, Any]],
) -> None:
    saved: dict[str, Any] = {}
    for result in results:
        saved |= result["buffers"][0]
    assert len(saved) == 8
    assert {value for name, value in saved.items() if "calls" in name} == {8}
    for result in results:
        for name, value in result["buffers"][1].items():
            assert value == saved[name]


def trained_with_a_loader(directory: Path, save_at: int, die_at: int, total: int) -> Any:
    """Train each layout on its own loader, from the newest checkpoints if there are any."""
    tokens, labels = full_batch(1)
    data = TensorDataset(tokens.repeat(3, 1), labels.repeat(3, 1))
    engines = {}
    for name, (stages, more) in RESUMED.items():
        config = config_of(1, bf16={"enabled": True}, **more)
        engines[name] = zerotrial.initialize(
            model=build(stages), training_data=data, config=config
        )[0]
        if (directory / name / "latest").exists():
            engines[name].load_checkpoint(directory / name)
    losses: dict[str, list[float]] = {name: [] for name in engines}
    for step in range(engines["2x2"].global_steps, total):
        for name, engine in engines.items():
            losses[name].append(float(engine.train_batch()))
            if step + 1 == save_at and die_at:
                engine.save_checkpoint(directory / name)
        if step + 1 == die_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    weights = {}
    for name, engine in engines.items():
        weights[name] = {key: value.clone() for key, value in engine.stage.full_weights()}
        engine.close()
    return losses, weights


RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "2x2": (2, {}),
    "4": (4, {}),
    "2x1x2": (
        2,
        {"tensor_parallel": {"size": 2, "plan": {"layers.*.mix": "colwise_gather_output"}}},
    ),
}
"""Pipeline x data x tensor on four ranks: pipeline stages, and what the file says more. On eight
there are twice as many replicas, and the last of them is 2 x 2 x 2."""


@pytest.mark.parametrize("ranks", [RANKS, pytest.param(2 * RANKS, marks=pytest.mark.soak)])
def test_killed_and_resumed_is_uninterrupted(tmp_path: Path, ranks: int) -> None:
    undisturbed = run_on_ranks(trained_with_a_loader, ranks, tmp_path / "none", 4, 0, 7)
    with pytest.raises(RankError, match=r"rank 1: no answer \(exit code -9\)"):
        run_on_ranks(trained_with_a_loader, ranks, tmp_path, 4, 5, 7)
    resumed = run_on_ranks(trained_with_a_loader, ranks, tmp_path, 4, 0, 7)
    for (losses, weights), (later, same) in zip(undisturbed, resumed, strict=True):
        for layout in RESUMED:
            assert later[layout] == losses[layout][4:], layout
            for name, weight in weights[layout].items():
                assert torch.equal(weight, same[layout][name]), (layout, name)
