"""A Trainer's checkpoint resumed at another number of ranks.

The Trainer gives its ranks neighbouring samples in turn. So where ranks x micro-batch x
accumulation stay the same, each update sees the same samples at any number of ranks, and only the
order in which their gradients are added differs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.engine.ranks import run_on_ranks
from tests.extensions.huggingface.test_trainer import (
    FP32,
    KEPT,
    assert_alike,
    auto,
    become_rank,
    make_trainer,
)
from zerotrial.extensions.deepspeed_api import install

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STAGES = ((0, 1), (2, 3))
"""ZeRO stages that each of the two processes trains alone; together they train all."""

UPDATE = 8
"""Samples of one, over all ranks; two micro-batches a rank."""


def train(root: str, stage: int, before: int | None = None) -> tuple[list[Any], dict[str, Any]]:
    """Train 4 updates, or the last 2 from a checkpoint of ``before`` ranks.

    Returns:
        Logs after update 2, and rank 0's weights at the start of training.
    """
    from transformers import TrainerCallback

    world = dist.get_world_size()
    begun: dict[str, torch.Tensor] = {}

    class Look(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            full = trainer.model_wrapped.full_state_dict()
            begun.update({name: value.clone() for name, value in full.items()})

    trainer = make_trainer(
        f"{root}/{stage}-{world}-{before}",
        auto(stage),
        per_device_train_batch_size=UPDATE // 2 // world,
        callbacks=[Look()],
    )
    resume = None if before is None else checkpoint(root, stage, before)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == 4
    trainer.model_wrapped.close()
    rows = [row for row in trainer.state.log_history if row["step"] > 2]
    return [{k: row[k] for k in KEPT if k in row} for row in rows], begun


def checkpoint(root: str, stage: int, world: int) -> str:
    return f"{root}/{stage}-{world}-None/checkpoint-2"


def resumed(root: str, stage: int, before: int) -> list[Any]:
    rows, begun = train(root, stage, before)
    if dist.get_rank() == 0:
        saved = load_file(f"{checkpoint(root, stage, before)}/model.safetensors")
        assert saved
        for name, value in saved.items():
            assert torch.equal(begun[name], value), name
    return rows


def begin_world(store: str, rank: int, ranks: int) -> None:
    """End the world of this process and begin another: to import transformers costs 7 seconds."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    become_rank()


def three_worlds(root: str) -> dict[int, list[list[Any]]]:
    """Train alone, then both together, then alone again; alone each process has its own stages."""
    install()
    rank = dist.get_rank()
    own_stages, every = STAGES[rank], [stage for stages in STAGES for stage in stages]
    begin_world(f"{root}/alone{rank}", 0, 1)
    states = {stage: train(root, stage)[0] for stage in own_stages}
    begin_world(f"{root}/together", rank, 2)
    dist.barrier()  # the other's checkpoint is complete
    both = {stage: (train(root, stage)[0], resumed(root, stage, 1)) for stage in every}
    begin_world(f"{root}/alone{rank}again", 0, 1)
    from_two = {stage: resumed(root, stage, 2) for stage in own_stages}
    begin_world(f"{root}/end", rank, 2)
    return {stage: [states[stage], *both[stage], from_two[stage]] for stage in own_stages}


def test_trainer_resumes_at_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    results = run_on_ranks(three_worlds, 2, str(tmp_path))
    assert [tuple(result) for result in results] == list(STAGES)
    for result in results:
        for first, second, from_one, from_two in result.values():
            for actual, expected in ((second, first), (from_one, first), (from_two, second)):
                assert sum("loss" in row for row in actual) == 2
                assert_alike(actual, expected, FP32)
