"""Pipeline stages, replicas and cut matrices together."""

import contextlib
import gc
import io
import os
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.pipelines import LENGTH, WIDTH, Block, batches, engine_of, reference
from tests.engine.ranks import run_on_ranks
from zerolab.errors import ConfigError
from zerotrial.extensions.activation_storage import StoredTensor

STEPS = 6
EXAMPLE = Path(__file__).parents[3] / "examples" / "gpt_3d" / "train.py"
CUT = {"tensor_parallel": {"size": 2, "plan": {"layers.*.mix": "colwise_gather_output"}}}
"""The tied embedding stays whole; the blocks between are cut."""


DIVIDED = {
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": 4,
    "activation_checkpointing": {"partition_activations": True},
}
"""Stored inputs of recomputed layers are divided among ranks."""

SCHEDULES: dict[str, tuple[int, int, int]] = {
    "1f1b": (1, 1, 1),
    "gpipe": (0, 1, 0),
    "interleaved": (2, 2, 0),
    "zero-bubble": (1, 1, 2),
}
"""ZeRO stage, chunks on each rank, and layers that are computed again together."""


@dataclass
class Trained:
    """Results of a run on one rank."""

    losses: list[float]
    norms: list[float]
    layout: dict[str, int]
    stored: int
    """Bytes of inputs that wait for backward, at most."""
    layers: int
    """Of this stage."""
    weights: dict[str, torch.Tensor]


def trained(schedule: str, directory: str) -> Trained:
    stage, chunks, interval = SCHEDULES[schedule]
    again = {"pipeline": {"schedule": schedule, "activation_checkpoint_interval": interval}}
    engine = engine_of(2, stage, schedule, chunks, **{**CUT, **DIVIDED, **again})
    assert engine.gradient_accumulation_steps() == 4
    losses, norms, peak = [], [], [0]

    def count(*_: Any) -> None:
        if engine.global_steps == 1:  # not while shapes are found out
            waiting = [item for item in gc.get_objects() if isinstance(item, StoredTensor)]
            peak.append(sum(item.values.nbytes for item in waiting))

    blocks = [layer for layer in engine.module.layers.values() if isinstance(layer, Block)]
    if interval:
        blocks[-1].register_forward_hook(count)
    for step in range(STEPS):
        losses.append(float(engine.train_batch(batches(step, engine))))
        norms.append(engine.get_global_grad_norm())
        if step == STEPS - 2:
            engine.save_checkpoint(directory)
    begin, end = engine.module.parts[engine.stage_id :][:2]
    weights = engine.full_state_dict() if schedule == "1f1b" else {}
    engine.close()
    return Trained(losses, norms, engine.mesh.layout, max(peak), end - begin, weights)


def resumed(directory: str) -> float:
    """Resume with 4 replicas of the full model, one per process."""
    engine = engine_of(1, 3)
    engine.load_checkpoint(directory)
    loss = float(engine.train_batch(batches(STEPS - 1, engine)))
    engine.close()
    return loss


MOVED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "2x2x2": (2, 1, CUT),
    "4x2": (4, 1, {}),
    "1x8 at stage 3": (1, 3, {}),
}
"""Of 8 ranks: pipeline stages, ZeRO stage, and what the file says more."""


def hop(source: str, target: str, stages: int, stage: int, more: dict[str, Any]) -> float:
    """Load on these ranks, train one step and save."""
    engine = engine_of(stages, stage, **more)
    engine.load_checkpoint(source)
    loss = float(engine.train_batch(batches(engine.global_steps, engine)))
    engine.save_checkpoint(target)
    engine.close()
    return loss


def moved(directory: str) -> dict[str, float]:
    """Load the checkpoint in each layout, save it there, and load it in the first again."""
    results = {}
    for name, (stages, stage, more) in MOVED.items():
        engine = engine_of(stages, stage, train_micro_batch_size_per_gpu=1, **more)
        engine.load_checkpoint(directory)
        engine.save_checkpoint(f"{directory}/{name}")
        results[f"to {name}"] = float(engine.train_batch(batches(STEPS - 1, engine)))
        engine.close()
    engine = engine_of(2, 1, **CUT)
    for name in MOVED:
        engine.load_checkpoint(f"{directory}/{name}")
        results[f"from {name}"] = float(engine.train_batch(batches(STEPS - 1, engine)))
    engine.close()
    return results


def refused() -> str:
    plan = {"size": 2, "plan": {"layers.*.mix": "colwise_gather_output", "layers.*.mox": "rowwise"}}
    with pytest.raises(ConfigError) as caught:
        engine_of(2, 1, tensor_parallel=plan)
    return str(caught.value)


def all_trained(directory: str) -> dict[str, Trained]:
    return {name: trained(name, f"{directory}/{name}") for name in SCHEDULES}


def all_cases(directory: str) -> Any:
    return all_trained(directory), resumed(f"{directory}/1f1b"), refused()


def check(runs: list[Trained]) -> None:
    losses, norms, weights, _ = reference(STEPS)
    for run in runs:
        assert run.losses == pytest.approx(losses, abs=1e-5)
        assert run.norms == pytest.approx(norms, abs=1e-5)
        for name, weight in run.weights.items():
            if name in weights:
                torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def four(directory: str) -> list[Any]:
    return run_on_ranks(all_cases, 4, directory)


@pytest.mark.processes
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipe_and_tensor_parallel_match_one_process(four: list[Any], schedule: str) -> None:
    runs = [results[schedule] for results, *_ in four]
    assert runs[0].layout == {"pipe": 2, "data": 1, "tensor": 2}
    assert schedule != "1f1b" or runs[0].weights.keys() >= reference(0)[2].keys()
    check(runs)


@pytest.mark.processes
def test_checkpoint_resumes_at_stage_3(four: list[Any]) -> None:
    losses, *_ = reference(STEPS)
    assert all(loss == pytest.approx(losses[-1], abs=1e-5) for _, loss, _ in four)


@pytest.mark.processes
@pytest.mark.usefixtures("four")
def test_checkpoint_resumes_on_2_1_and_4_ranks(directory: str) -> None:
    ways = (("1f1b", "two", 1, 3, CUT), ("two", "one", 1, 0, {}), ("one", "last", 2, 2, CUT))
    (losses, *_), resumed = reference(STEPS + 2), []
    for ranks, (source, target, *layout) in zip((2, 1, 4), ways, strict=True):
        paths = f"{directory}/{source}", f"{directory}/{target}"
        resumed.append(run_on_ranks(hop, ranks, *paths, *layout))
    for actual, expected in zip(resumed, losses[STEPS - 1 :], strict=True):
        assert actual == pytest.approx([expected] * len(actual), abs=1e-5)


@pytest.mark.processes
def test_pattern_must_match_a_layer_of_some_stage(four: list[Any]) -> None:
    for *_, text in four:
        assert "'layers.*.mox' fits no layer" in text
        assert "'layers.*.mix'" not in text


@pytest.mark.processes
def test_tensor_ranks_share_recomputed_inputs(
    four: list[Any],
) -> None:
    half = 4 * LENGTH * WIDTH * 4 // 2  # bytes of an input of 4 samples, on each of 2 ranks
    for rank, (results, *_) in enumerate(four):
        last = rank // 2
        run = results["1f1b"]
        layers = run.layers - last  # counted before the head, which is a separate layer
        assert layers > 2
        assert run.stored == (2 - last) * (layers - 1) * half  # the first is a micro-batch ahead
        assert results["zero-bubble"].stored >= half


def on_eight(directory: str) -> Any:
    return all_trained(directory), moved(f"{directory}/1f1b")


def run_example(options: list[str]) -> str:
    """Run the example on this rank; return its output."""
    os.environ["RANK"] = str(dist.get_rank())
    sys.argv = [str(EXAMPLE), *options]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return output.getvalue()


@pytest.mark.slow
@pytest.mark.processes
def test_example_losses_on_4_ranks_and_one(tmp_path: Path) -> None:
    def losses(ranks: int, *options: str) -> list[tuple[int, float]]:
        chief, *_ = run_on_ranks(run_example, ranks, list(options))
        lines = re.findall(r"^step (\d+).*?loss ([\d.]+)", chief, re.MULTILINE)
        return [(int(step), float(loss)) for step, loss in lines]

    spread = losses(4, "--pipe=2", "--tensor=2", "--steps=2", f"--checkpoints={tmp_path}/a")
    resumed = losses(1, "--steps=3", f"--checkpoints={tmp_path}/a")
    expected = losses(1, "--steps=3", f"--checkpoints={tmp_path}/b")
    assert [step for step, _ in spread + resumed] == [step for step, _ in expected]
    for (_, loss), (step, plain) in zip(spread + resumed, expected, strict=True):
        # The example prints four digits, and processors round the last one differently.
        assert loss == pytest.approx(plain, abs=3e-4), step
    assert len(expected) == 3


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.processes
def test_three_axes_match_one_process(
    tmp_path: Path,
) -> None:
    rank_results = run_on_ranks(on_eight, 8, str(tmp_path))
    losses, *_ = reference(STEPS)
    for schedule in SCHEDULES:
        runs = [results[schedule] for results, _ in rank_results]
        assert runs[0].layout == {"pipe": 2, "data": 2, "tensor": 2}
        check(runs)
    for runs_of_rank, results in rank_results:
        assert len(results) == 2 * len(MOVED)
        assert results == {name: pytest.approx(losses[-1], abs=1e-5) for name in results}
        # a new engine, to the last bit
        assert results["from 2x2x2"] == runs_of_rank["1f1b"].losses[-1]
