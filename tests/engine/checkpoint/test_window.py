"""Checkpoints between two accumulation boundaries: nothing of the window is lost."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine.checkpoint.test_ranks import error_of
from tests.engine.checkpointing import Ranks, all_states, make_engine
from tests.engine.ranks import run_on_ranks
from zerotrial.engine import Engine
from zerotrial.engine.checkpoint.files import CheckpointError

ACCUMULATION = 4
SAMPLES = 4
"""In one micro-batch, over all ranks."""

WORLDS = (1, 2, 4)
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 1}},
    "lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}},
}
FIRST, LAST = 8, 16
"""Micro-steps: checkpoints are made in the window after the first, runs end at the last."""

AFTER = [(at, "after step") for at in (1, 2, 3)]
BEFORE = [(at, "before step") for at in (1, 2, 3, 4)]
"""After which micro-batch of the window, and whether step() has ended it."""


def window_engine(stage: int, group: Any = None, seed: int = 0, **config: Any) -> Engine:
    zero = {"reduce_bucket_size": 300, **config.pop("zero", {})}
    accumulation = config.pop("gradient_accumulation_steps", ACCUMULATION)
    return make_engine(
        stage,
        mpu=None if group is None else Ranks(group),
        seed=seed,
        zero=zero,
        train_batch_size=SAMPLES * ACCUMULATION,
        gradient_accumulation_steps=accumulation,
        **config,
    )


def backward(engine: Engine, at: int) -> float:
    """Gather the gradients of this rank's part of the data that belongs to micro-step ``at``."""
    rank = dist.get_rank(engine.group) if engine.group is not None else 0
    batch = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(500 + at))
    loss = engine(batch[rank :: engine.dp_world_size])
    engine.backward(loss)
    return float(loss.detach())


def window(engine: Engine) -> tuple[int, int]:
    """Micro-batches ended since the last boundary, and backward passes since the last step."""
    return engine.progress.ended, engine.progress.backwards


def train_to(engine: Engine, stop: int) -> list[float]:
    """Train up to a micro-step; finish a started one first."""
    losses = []
    if engine.progress.backwards:
        engine.step()
    while engine.micro_steps < stop:
        losses.append(backward(engine, engine.micro_steps))
        engine.step()
    return losses


def summary(engine: Engine) -> dict[str, Any]:
    """Return the state that must be bitwise equal."""
    states = {key: value.clone() for key, value in all_states(engine).items()}
    counters = {**engine.progress.counters(), "scale": engine.loss_scale, "lr": engine.get_lr()}
    return {"states": states, "counters": counters, "norm": engine.get_global_grad_norm()}


def unequal(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    keys = actual["states"].keys() | expected["states"].keys()
    different = [
        key
        for key in sorted(keys)
        if not torch.equal(actual["states"].get(key, torch.empty(0)), expected["states"][key])
    ]
    pairs = [(actual[name], expected[name]) for name in ("counters", "norm")]
    return different + [f"{value} instead of {other}" for value, other in pairs if value != other]


def save_at(engine: Engine, directory: Path, moments: list[Any]) -> list[float]:
    """Go through a window, and save at some moments, every second time in the background."""
    losses = []
    for at in range(1, ACCUMULATION + 1):
        losses.append(backward(engine, FIRST + at - 1))
        if (at, "before step") in moments:
            engine.save_checkpoint(directory, tag=f"{at} before step", async_save=at % 2 == 0)
        engine.step()
        if (at, "after step") in moments:
            engine.save_checkpoint(directory, tag=f"{at} after step", async_save=at % 2 == 1)
    engine.wait_for_checkpoint()
    return losses


def places(engine: Engine, at: int, moment: str) -> list[str]:
    """Return differences from the state that a load must restore."""
    ended, backwards = (at, 0) if moment == "after step" else (at - 1, 1)
    expected = (FIRST + ended, ended, backwards, at, ended == ACCUMULATION - 1)
    actual = (
        engine.micro_steps,
        *window(engine),
        engine.progress.waiting,
        engine.is_gradient_accumulation_boundary(),
    )
    return [] if actual == expected else [f"at {actual} instead of {expected}"]


def same_place(directory: Path, group: Any, stage: int, kind: str) -> list[str]:
    """Compare uninterrupted, continued and resumed training bitwise at each moment."""
    config = {"dropout": 0.2, **KINDS[kind]}
    moments = AFTER + BEFORE if kind == "fp32" else AFTER[:1]
    untouched = window_engine(stage, group, **config)
    train_to(untouched, FIRST)
    middle = train_to(untouched, FIRST + ACCUMULATION)
    losses = train_to(untouched, LAST)
    expected = summary(untouched)
    untouched.close()

    problems = []
    saver = window_engine(stage, group, **config)
    train_to(saver, FIRST)
    if save_at(saver, directory, moments) != middle or train_to(saver, LAST) != losses:
        problems.append("saving changed the losses")
    problems += [f"saving changed {text}" for text in unequal(summary(saver), expected)]
    saver.close()

    again = window_engine(stage, group, seed=1, **config)
    for at, moment in moments:
        backward(again, 99)  # the load must remove all of this
        again.load_checkpoint(directory, tag=f"{at} {moment}")
        differing = places(again, at, moment)
        if train_to(again, LAST) != [*middle[at:], *losses]:
            differing.append("other losses")
        differing += unequal(summary(again), expected)
        problems += [f"{at} {moment}: {text}" for text in differing]
    again.close()
    return problems


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative difference of any state, by norm."""
    assert actual.keys() == expected.keys()
    return max(
        float((actual[key] - expected[key]).norm() / expected[key].norm().clamp(min=1e-12))
        for key in expected
    )


def finish_window(engine: Engine) -> tuple[dict[str, Tensor], float]:
    train_to(engine, FIRST + ACCUMULATION)
    norm = engine.get_global_grad_norm()
    assert norm is not None
    return summary(engine)["states"], norm


def far_off(
    actual: tuple[dict[str, Tensor], float], expected: tuple[dict[str, Tensor], float]
) -> list[str]:
    states, norm = distance(actual[0], expected[0]), abs(actual[1] / expected[1] - 1)
    near = max(states, norm) <= 1e-6
    return [] if near else [f"states differ by {states:.1e}, norms by {norm:.1e}"]


SAVERS: list[tuple[int, int, str, dict[str, Any]]] = [
    (0, 2, "2 after step", {}),
    (0, 4, "3 before step", {"prescale_gradients": True}),
    (1, 4, "2 after step", {"gradient_predivide_factor": 2.0}),
    (1, 2, "4 before step", {}),
    (2, 2, "3 after step", {}),
    (2, 4, "1 before step", {}),
    (3, 4, "1 after step", {}),
    (3, 1, "3 before step", {}),
]


def save_at_places(directory: Path, groups: dict[int, Any]) -> list[Any]:
    """Return the results of each save at the end of the window, if this rank took part."""
    ends: list[Any] = []
    for index, (stage, world, moment, config) in enumerate(SAVERS):
        ends.append(None)
        if dist.get_rank() < world:
            engine = window_engine(stage, groups[world], **config)
            train_to(engine, FIRST)
            at = int(moment[0])
            train_to(engine, FIRST + at - 1)
            backward(engine, engine.micro_steps)
            if moment.endswith("after step"):
                engine.step()
            engine.save_checkpoint(directory / f"{index}")
            ends[-1] = finish_window(engine)
            engine.close()
        ends[-1] = _first(ends[-1])
    return ends


def _first(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def resume_in_other_layout(engine: Engine, directory: Path, again: Path, end: Any) -> list[str]:
    """End a window that others began; save some once more on the way, and resume that too."""
    engine.load_checkpoint(directory)
    if window(engine) != (2, 0):
        return far_off(finish_window(engine), end)
    train_to(engine, FIRST + 3)  # now there are averages and shares in one window
    engine.save_checkpoint(again)
    problems = far_off(finish_window(engine), end)
    expected = summary(engine)
    engine.load_checkpoint(again)
    finish_window(engine)
    return problems + [f"again: {text}" for text in unequal(summary(engine), expected)]


def other_layouts(directory: Path, groups: dict[int, Any]) -> list[str]:
    """Every saver's window is ended at every stage, in turn on each number of ranks."""
    ends = save_at_places(directory, groups)
    problems = []
    for stage, world in itertools.product(range(4), WORLDS):
        if dist.get_rank() >= world:
            continue
        engine = window_engine(stage, groups[world], seed=1)
        for index, (saver, end) in enumerate(zip(SAVERS, ends, strict=True)):
            if WORLDS[(index + stage) % len(WORLDS)] == world:
                again = directory / f"{index}-{stage}-{world}"
                differing = resume_in_other_layout(engine, directory / f"{index}", again, end)
                problems += [f"{saver} -> {(stage, world)}: {text}" for text in differing]
        engine.close()
    dist.barrier()
    return problems


def unlike_ranks(directory: Path) -> list[str]:
    engine = window_engine(1, dist.group.WORLD)
    backward(engine, 0)
    if dist.get_rank() != 1:
        engine.step()
    text = error_of(lambda: engine.save_checkpoint(directory))
    engine.close()
    dist.barrier()
    return [text, *[path.name for path in directory.glob("*")]]


def on_four_ranks(directory: str) -> dict[str, Any]:
    base = Path(directory)
    groups = {world: dist.new_group(list(range(world))) for world in WORLDS}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = dist.get_rank() // 2  # at stages 0 and 2, and at 1 and 3, at the same time
    same = {
        (stage, kind): same_place(base / f"{stage}-{kind}", pairs[pair], stage, kind)
        for stage in (pair, pair + 2)
        for kind in KINDS
    }
    dist.barrier()
    return {
        "same": same,
        "other": other_layouts(base / "other", groups),
        "unlike": unlike_ranks(base / "unlike"),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(on_four_ranks, 4, str(tmp_path_factory.mktemp("window")))


@pytest.mark.processes
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_window_resumes_bitwise(results: list[dict[str, Any]], stage: int, kind: str) -> None:
    problems = [
        result["same"][stage, kind] for result in results if (stage, kind) in result["same"]
    ]
    assert problems == [[], []]


@pytest.mark.processes
def test_window_resumes_at_other_stages_and_ranks(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert result["other"] == []


@pytest.mark.processes
def test_ranks_at_different_micro_batches_are_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        text, *files = result["unlike"]
        assert "must be at the same micro-batch" in text
        assert "by rank: 1 + 0, 0 + 1, 1 + 0, 1 + 0" in text
        assert files == []


STAGE = 1


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """Directory with a checkpoint after two of four micro-batches of a window, and its end."""
    engine = window_engine(STAGE)
    train_to(engine, FIRST + 2)
    engine.save_checkpoint(tmp_path / "half")
    torch.save(finish_window(engine), tmp_path / "end.pt")
    return tmp_path / "half"


def test_checkpoint_at_a_boundary_has_no_gradients(half: Path, tmp_path: Path) -> None:
    name = "gradients-00000-000.safetensors"
    assert (half / "global_step2" / name).is_file()
    engine = window_engine(STAGE)
    engine.load_checkpoint(half)
    train_to(engine, FIRST + ACCUMULATION)
    engine.save_checkpoint(tmp_path / "whole")
    assert not (tmp_path / "whole" / "global_step3" / name).exists()


@pytest.mark.parametrize("steps", [2, 8])
def test_window_resumes_at_a_proportional_length(half: Path, steps: int) -> None:
    engine = window_engine(STAGE, gradient_accumulation_steps=steps)
    engine.load_checkpoint(half)
    assert engine.micro_steps == 2 * steps + steps // 2
    assert window(engine) == (steps // 2, 0)
    losses = [
        torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(510 + at)) for at in (0, 1)
    ]
    for part in torch.cat(losses).chunk(steps // 2):
        engine.backward(engine(part))
        engine.step()
    end = torch.load(half.parent / "end.pt", weights_only=True)
    assert engine.global_steps == 3
    norm = engine.get_global_grad_norm()
    assert norm is not None
    assert far_off((summary(engine)["states"], norm), end) == []


def test_window_of_unfitting_length_is_refused(half: Path) -> None:
    engine = window_engine(STAGE, gradient_accumulation_steps=1)
    expected = (
        r"gradient_accumulation_steps: must be a multiple of 2, got 1: the checkpoint was made "
        r"after 2 of 4 micro-batches .*load_optimizer_states=False"
    )
    with pytest.raises(CheckpointError, match=expected):
        engine.load_checkpoint(half)
    engine.load_checkpoint(half, load_optimizer_states=False)
    assert (engine.micro_steps, engine.global_steps, window(engine)) == (2, 2, (0, 0))


def test_unfinished_micro_batch_needs_the_same_length(tmp_path: Path) -> None:
    engine = window_engine(STAGE)
    backward(engine, 0)
    engine.save_checkpoint(tmp_path)
    other = window_engine(STAGE, gradient_accumulation_steps=8)
    with pytest.raises(CheckpointError, match=r"must be 4, got 8: .*between backward\(\) and step"):
        other.load_checkpoint(tmp_path)


@pytest.mark.parametrize("options", [{"load_optimizer_states": False}, {"load_module_only": True}])
def test_window_is_dropped_without_optimizer_states(half: Path, options: dict[str, bool]) -> None:
    engine = window_engine(STAGE)
    train_to(engine, 3)
    engine.load_checkpoint(half, **options)
    assert engine.progress.waiting == 0
    assert engine.micro_steps == engine.global_steps * ACCUMULATION
    start = engine.micro_steps
    losses = train_to(engine, start + ACCUMULATION)

    reference = window_engine(STAGE)
    reference.load_checkpoint(half, **options)
    assert train_to(reference, start + ACCUMULATION) == losses
    assert unequal(summary(engine), summary(reference)) == []


def test_failed_load_keeps_the_running_window(half: Path) -> None:
    engine = window_engine(STAGE)
    train_to(engine, FIRST + 2)
    path = half / "global_step2" / "gradients-00000-000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"gradients-00000-000.safetensors: damaged"):
        engine.load_checkpoint(half)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"gradients-00000-000.safetensors: missing"):
        engine.load_checkpoint(half)
    end = torch.load(half.parent / "end.pt", weights_only=True)
    assert far_off(finish_window(engine), end) == []


@pytest.mark.parametrize("scaling", [{"loss_scale": 8.0}, {"initial_scale_power": 3}])
def test_gradients_get_the_loss_scale_of_the_engine(
    tmp_path: Path, scaling: dict[str, float]
) -> None:
    config = {"enabled": True, "loss_scale_window": 1, "initial_scale_power": 6}
    engine = window_engine(STAGE, fp16=config)
    train_to(engine, FIRST + 2)
    assert engine.loss_scale == 128.0
    engine.save_checkpoint(tmp_path)
    _, norm = finish_window(engine)
    other = window_engine(2, fp16={"enabled": True, **scaling})
    other.load_checkpoint(tmp_path)
    assert other.loss_scale == (8.0 if "loss_scale" in scaling else 128.0)
    assert finish_window(other)[1] == pytest.approx(norm, rel=2e-3)


def test_save_after_failed_backward_is_at_last_boundary(tmp_path: Path) -> None:
    engine = window_engine(STAGE)
    train_to(engine, FIRST + 1)
    loss = engine(torch.ones(2, 6))
    hook = engine.module.first.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    hook.remove()
    engine.save_checkpoint(tmp_path)
    again = window_engine(STAGE, seed=1)
    again.load_checkpoint(tmp_path)
    for closing in (engine, again):
        assert (closing.micro_steps, window(closing)) == (FIRST, (0, 0))
        train_to(closing, LAST)
    assert unequal(summary(again), summary(engine)) == []


def test_two_backwards_before_step_are_one_micro_batch(tmp_path: Path) -> None:
    engine = window_engine(STAGE)
    backward(engine, 0)
    backward(engine, 1)
    engine.save_checkpoint(tmp_path)
    engine.step()
    assert engine.progress.waiting == 1
    engine.load_checkpoint(tmp_path)
    assert window(engine) == (0, 2)
    engine.step()
    engine.drop_micro_batches()
    assert engine.micro_steps == 0
