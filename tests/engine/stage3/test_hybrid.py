"""Hybrid sharding: states are sharded over some ranks, and the others are replicas of these."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.formulas import data_traffic
from tests.engine import pipelines
from tests.engine.checkpointing import Net, all_states, make_engine, probe
from tests.engine.ranks import run_on_ranks
from tests.engine.stage3.test_stage3 import Course, adamw, compare, seeded, train
from tests.engine.stage3_models import Language, make_batches, train_plainly
from tests.engine.tensor_sizes import storage_bytes
from zerolab.errors import ConfigError
from zerotrial.engine import Engine, initialize
from zerotrial.engine.checkpoint.shards import read_tensors
from zerotrial.engine.memory import estimate

STEPS, ACCUMULATION, CLIP = 5, 4, 0.5
STAGES = (1, 2, 3)


def hybrid(stage: int, shard: int = 2, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "mics_shard_size": shard, **more}}


def language() -> Language:
    return Language(width=8, blocks=2)


CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    **{
        f"stage {stage}": (STEPS, ACCUMULATION, {**hybrid(stage), "gradient_clipping": CLIP})
        for stage in STAGES
    },
    **{f"stage {stage}, shard 1": (2, 2, hybrid(stage, 1)) for stage in (1, 3)},
    "shard of all": (2, 1, hybrid(3, 4)),
    "all-reduced": (2, 2, hybrid(2, reduce_scatter=False)),
    "on the host": (2, 2, hybrid(2, offload_optimizer={"device": "cpu"})),
    "prescaled": (2, 2, {**hybrid(1), "prescale_gradients": True}),
    "predivided": (2, 2, {**hybrid(2), "gradient_predivide_factor": 2.0}),
}
"""Steps, micro-batches of each, and the file."""

SUMS = {
    f"sum, stage {stage}": {**hybrid(stage), "gradient_allreduce_op": "sum"} for stage in (2, 3)
}


def batches_of(steps: int, micro: int) -> list[list[list[Any]]]:
    return make_batches(steps, micro, 4)


def train_every_case() -> dict[str, Course]:
    actual = {
        name: train(language, batches_of(steps, micro), config)
        for name, (steps, micro, config) in CASES.items()
    }
    for name, config in SUMS.items():
        actual[name] = train(language, batches_of(2, 1), config)
    return actual


def first_norm(op: str) -> float:
    """The first norm, of the mean over 4 ranks or of their sum."""
    plain = train_plainly(lambda: seeded(language), batches_of(1, 1), adamw)
    return plain.norms[0] * (4 if op == "sum" else 1)


def stored_elements(stage: int) -> dict[str, Any]:
    """Return memory and traffic of one rank, and the equality of its replicas."""
    engine: Engine = initialize(
        model=seeded(lambda: torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            **hybrid(stage),
        },
    )[0]
    for step in range(4):
        engine.stage.traffic.clear() if step == 2 else None
        engine.backward(engine(torch.randn(2, 16)).square().mean())
        engine.step()
    kinds = {
        kind: storage_bytes(tensors) for kind, tensors in engine.stage.tensors_by_kind().items()
    }
    states = [
        (p.name, p.start, {k: t.clone() for k, t in p.tensors.items()})
        for p in engine.stage.pieces()
    ]
    everyones: list[Any] = [None] * 4
    dist.all_gather_object(everyones, states)
    shard, replica = everyones[engine.mesh.shard.rank], everyones[engine.mesh.shard.rank + 2]
    actual = {
        "bytes": kinds,
        "moved": dict(engine.stage.traffic.elements),
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        "alike": all(
            a[:2] == b[:2] and all(torch.equal(a[2][kind], b[2][kind]) for kind in a[2])
            for a, b in zip(shard, replica, strict=True)
        ),
    }
    engine.close()
    return actual


def full_tensor_calls(engine: Engine) -> dict[str, Any]:
    """Read and write full tensors, also within an accumulation window."""
    micro(engine)
    gradient = engine.full("norm.weight", "gradient")
    engine.backward(engine(data_of(engine)))  # averaged gradients accumulate
    engine.step()
    engine.set_full("norm.weight", torch.full((17,), 2.0))
    engine.set_full("norm.weight", torch.full((17,), 3.0), "exp_avg")
    actual = {
        "gradient": gradient,
        "weight": engine.full("norm.weight"),
        "state": engine.full("norm.weight", "exp_avg"),
        "names": sorted(engine.full_state_dict()),
        "norm": engine.get_global_grad_norm(),
    }
    engine.close()
    return actual


def refusals() -> dict[str, str]:
    actual = {}
    for name, config in {"3": hybrid(3, 3), "stage 0": hybrid(0)}.items():
        with pytest.raises(ConfigError) as caught:
            initialize(model=Net(), config={"train_batch_size": 4, **config})
        actual[name] = str(caught.value)
    return actual


def shared(stage: int, seed: int = 0) -> Engine:
    return make_engine(stage, seed=seed, zero={"mics_shard_size": 2}, **WINDOW)


WINDOW: dict[str, Any] = {"train_batch_size": 16, "gradient_accumulation_steps": 2}


def data_of(engine: Engine) -> torch.Tensor:
    generator = torch.Generator().manual_seed(engine.micro_steps)
    ranks = engine.dp_world_size
    return torch.randn(8, 6, generator=generator)[engine.mesh.data.rank :: ranks]


def micro(engine: Engine, count: int = 1) -> None:
    for _ in range(count):
        engine.backward(engine(data_of(engine)))
        engine.step()


AXES: dict[str, tuple[int, dict[str, Any]]] = {
    "2 pipeline stages": (2, hybrid(2, 1)),
    "cut matrices": (
        1,
        {
            **hybrid(1, 1),
            "tensor_parallel": {"size": 2, "plan": {"layers.*.mix": "colwise_gather_output"}},
        },
    ),
}
"""Pipeline stages, and the file: 2 data-parallel ranks remain, which are replicas."""


def other_axes() -> dict[str, Any]:
    """Losses and norms of a model with tied layers."""
    actual = {}
    for name, (stages, config) in AXES.items():
        engine = pipelines.engine_of(stages, 1, **config)
        course = []
        for step in range(4):
            loss = float(engine.train_batch(pipelines.batches(step, engine)))
            course += [loss, engine.get_global_grad_norm()]
        actual[name] = course, engine.mesh.layout, engine.mesh.replicate.size
        engine.close()
    return actual


def all_cases() -> dict[str, Any]:
    return {
        "axes": other_axes(),
        "courses": train_every_case(),
        "held": {stage: stored_elements(stage) for stage in STAGES},
        "whole": {stage: full_tensor_calls(shared(stage)) for stage in STAGES},
        "refused": refusals(),
    }


@pytest.fixture(scope="module")
def four() -> list[Any]:
    return run_on_ranks(all_cases, 4)


@pytest.mark.processes
def test_2_replicas_of_2_shards_train_like_one_process(four: list[Any]) -> None:
    problems: dict[Any, list[str]] = {}
    for name, (steps, window, config) in CASES.items():
        clip = config.get("gradient_clipping", 0.0)
        batches = batches_of(steps, window)
        expected = train_plainly(lambda: seeded(language), batches, adamw, clip=clip)
        for rank, result in enumerate(four):
            if lines := compare(result["courses"][name], expected, 1e-6):
                problems[name, rank] = lines
    assert not problems


@pytest.mark.processes
def test_sum_over_shards_is_also_a_sum_over_replicas(four: list[Any]) -> None:
    for name in SUMS:
        assert four[0]["courses"][name].norms[0] == pytest.approx(first_norm("sum"), rel=1e-6)


@pytest.mark.processes
def test_rank_memory_and_traffic_match_the_planner(four: list[Any]) -> None:
    for result in four:
        for stage, actual in result["held"].items():
            number = actual["parameters"]
            planned = estimate(number, 272, 2, stage, precision="fp32", device="cpu")
            assert actual["alike"], stage
            assert actual["bytes"]["optimizer"] == pytest.approx(planned.moments, rel=0.05), stage
            assert actual["bytes"]["master"] == pytest.approx(planned.master, rel=0.05), stage
            moved = sum(actual["moved"].values())
            assert moved == data_traffic(number, stage, 2, 4, shard=2), (stage, actual["moved"])


@pytest.mark.processes
def test_full_tensors_can_be_read_and_written_at_any_time(four: list[Any]) -> None:
    single = full_tensor_calls(make_engine(0, **WINDOW))
    for result in four:
        for stage, actual in result["whole"].items():
            torch.testing.assert_close(actual["gradient"], single["gradient"], msg=str(stage))
            assert actual["norm"] == pytest.approx(single["norm"], rel=1e-5)
            assert torch.equal(actual["weight"], torch.full((17,), 2.0))
            assert torch.equal(actual["state"], torch.full((17,), 3.0))
    assert four[0]["whole"][1]["names"] == four[0]["whole"][3]["names"] == single["names"]


@pytest.mark.processes
def test_replicas_combine_with_pipeline_and_tensor_parallelism(four: list[Any]) -> None:
    losses, norms, *_ = pipelines.reference(4)
    expected = [value for pair in zip(losses, norms, strict=True) for value in pair]
    for result in four:
        for name, (course, layout, replicas) in result["axes"].items():
            assert (layout["data"], replicas) == (2, 2), name
            assert course == pytest.approx(expected, rel=1e-5), name


@pytest.mark.processes
def test_invalid_layouts_are_refused(four: list[Any]) -> None:
    for result in four:
        assert (
            "mics_shard_size: must divide the data-parallel size 4, got 3" in result["refused"]["3"]
        )
        assert "must be -1 at stage 0" in result["refused"]["stage 0"]


BOUNDARY, MIDDLE, END = 2, 3, 6
"""Micro-batches: checkpoints are made after the first two, runs end after the last."""


def train_and_save(stage: int, directory: str) -> Engine:
    engine = shared(stage)
    micro(engine, BOUNDARY)
    engine.save_checkpoint(f"{directory}/{stage}", tag="boundary", async_save=stage == 2)
    micro(engine, MIDDLE - BOUNDARY)
    engine.save_checkpoint(f"{directory}/{stage}", tag="middle")
    return engine


def save_and_die(directory: str) -> None:
    for stage in STAGES:
        micro(train_and_save(stage, directory), 2)  # lost
    try:
        dist.barrier()
    finally:  # a rank that exits first closes the connections of the others
        os._exit(9)


def ended(engine: Engine) -> dict[str, Any]:
    micro(engine, END - engine.micro_steps)
    states = {key: value.clone() for key, value in all_states(engine).items()}
    actual = {"states": states, "norm": engine.get_global_grad_norm(), "probe": probe(engine)}
    engine.close()
    return actual


def resume_all(directory: str) -> dict[tuple[str, int], Any]:
    """From each stage's checkpoints and, in 4 ranks, from the start; to the end."""
    actual: dict[tuple[str, int], Any] = {}
    four = (
        dist.is_initialized() and dist.get_world_size() == 4
    )  # other cases leave worlds of one rank behind
    for stage in STAGES:
        for tag in ("boundary", "middle"):
            engine = shared(stage, seed=9) if four else make_engine(stage, **WINDOW)
            engine.load_checkpoint(f"{directory}/{stage}", tag=tag)
            actual[tag, stage] = ended(engine)
        engine = make_engine((stage + 1) % 4, seed=9, **WINDOW)  # full data axes, and stage 0
        engine.load_checkpoint(f"{directory}/{stage}")
        actual["elsewhere", stage] = ended(engine)
        if four:
            actual["undisturbed", stage] = ended(shared(stage))
            actual["saved", stage] = ended(train_and_save(stage, f"{directory}/again"))
    return actual


def differences(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    states = actual["states"].items()
    differ = [key for key, state in states if not torch.equal(state, expected["states"][key])]
    return differ + ["norm"] * (actual["norm"] != expected["norm"])


@pytest.mark.processes
def test_killed_run_resumes_bitwise_and_in_any_other_layout(tmp_path: Path) -> None:
    dead = run_on_ranks(save_and_die, 4, str(tmp_path), expect_deaths=True)
    assert dead == [None] * 4
    for stage in STAGES:
        masters = _saved_elements(tmp_path / str(stage) / "middle")
        assert masters == sum(p.numel() for p in Net().parameters() if p.requires_grad)
    results = run_on_ranks(resume_all, 4, str(tmp_path))
    single = resume_all(str(tmp_path))
    for actual in results:
        for stage in STAGES:
            expected = actual["undisturbed", stage]
            assert not differences(actual["boundary", stage], expected), stage
            # A save in mid-window averages gradients over replicas early.
            assert not differences(actual["middle", stage], actual["saved", stage]), stage
            resumed = [actual["saved", stage], actual["elsewhere", stage]]
            resumed += [single[kind, stage] for kind in ("boundary", "middle", "elsewhere")]
            for other in resumed:
                assert other["norm"] == pytest.approx(expected["norm"], rel=1e-5)
                assert other["probe"] == pytest.approx(expected["probe"], rel=1e-5)


def _saved_elements(directory: Path) -> int:
    """Return the elements of master weights in a checkpoint's files, each counted once."""
    actual = 0
    for path in directory.glob("rank-*.safetensors"):
        tensors = read_tensors([path])
        actual += sum(t.numel() for key, t in tensors.items() if key.endswith("/master"))
    return actual
