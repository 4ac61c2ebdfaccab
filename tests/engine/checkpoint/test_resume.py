"""Any stage and number of ranks resumes from any other."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine.checkpointing import Ranks, all_states, make_engine, probe, train
from tests.engine.ranks import run_on_ranks
from zerotrial.engine import Engine, initialize

STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 4)


def losses_of_all_ranks(engine: Engine, steps: int) -> list[list[float]]:
    """By rank, then by step."""
    gathered: list[Any] = [None] * engine.dp_world_size
    dist.all_gather_object(gathered, train(engine, steps), group=engine.group)
    return gathered


def save_at_every_stage_and_world_size(directory: str, groups: dict[int, Any]) -> None:
    for world, stage in product(WORLDS, STAGES):
        if dist.get_rank() < world:
            engine = make_engine(stage, mpu=Ranks(groups[world]))
            train(engine, 3)
            path = f"{directory}/{stage}-{world}"
            engine.save_checkpoint(path, client_state={"at": [3]})
            before = {"probe": probe(engine), "states": all_states(engine)}
            after = {"losses": losses_of_all_ranks(engine, 2), "end": probe(engine)}
            if dist.get_rank() == 0:
                torch.save(before | after, f"{path}.pt")
            engine.close()
    dist.barrier()


def differences(engine: Engine, expected: dict[str, Any], *, same_place: bool) -> list[str]:
    problems = []
    states = all_states(engine)
    if states.keys() != expected["states"].keys():
        return [f"states {sorted(states)} instead of {sorted(expected['states'])}"]
    problems += [key for key in states if not torch.equal(states[key], expected["states"][key])]
    if (engine.global_steps, engine.micro_steps, engine.skipped_steps) != (3, 3, 0):
        problems.append(f"counters {engine.progress.counters()}")
    if (loss := probe(engine)) != expected["probe"]:
        problems.append(f"the same weights give {loss!r} instead of {expected['probe']!r}")
    losses = losses_of_all_ranks(engine, 2)
    if same_place:
        if losses != expected["losses"] or probe(engine) != expected["end"]:
            problems.append(f"not bit-identical: {losses} instead of {expected['losses']}")
        return problems
    for a, b in zip(mean_over_ranks(losses), mean_over_ranks(expected["losses"]), strict=True):
        if abs(a - b) > 1e-6 * abs(b):
            problems.append(f"loss {a!r} instead of {b!r}")
    return problems


def mean_over_ranks(losses: list[list[float]]) -> list[float]:
    return [sum(step) / len(step) for step in zip(*losses, strict=True)]


def is_chosen(stage: int, world: int, source: tuple[int, int]) -> bool:
    """Choose a third of all pairs: with each pair of stages and each of numbers of ranks."""
    places = stage + WORLDS.index(world), source[0] + WORLDS.index(source[1])
    return source == (stage, world) or sum(places) % 3 == 0


def save_and_load_everything(directory: str, all_pairs: bool) -> list[str]:
    """On 4 ranks: the 12 checkpoints are loaded by 12 engines, in part used before."""
    groups = {world: dist.new_group(list(range(world))) for world in WORLDS}
    save_at_every_stage_and_world_size(directory, groups)
    problems: list[str] = []
    for world, stage in product(WORLDS, STAGES):
        if dist.get_rank() < world:
            engine = make_engine(stage, mpu=Ranks(groups[world]), seed=1)
            for source in product(STAGES, WORLDS):
                if not all_pairs and not is_chosen(stage, world, source):
                    continue
                path = f"{directory}/{source[0]}-{source[1]}"
                result = engine.load_checkpoint(path)
                expected = torch.load(f"{path}.pt", weights_only=True)
                unequal = differences(engine, expected, same_place=source == (stage, world))
                if result != (f"{path}/global_step3", {"at": [3]}):
                    unequal.append(f"load_checkpoint returned {result}")
                problems += [f"{source} -> {(stage, world)}: {text}" for text in unequal]
            engine.close()
    dist.barrier()
    return problems


@pytest.mark.processes
@pytest.mark.parametrize("all_pairs", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_resume_at_any_stage_and_world_size(tmp_path: Path, all_pairs: bool) -> None:
    for problems in run_on_ranks(save_and_load_everything, 4, str(tmp_path), all_pairs):
        assert problems == []


class SquareLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(x).pow(2).mean()
        return loss


def test_load_logs_the_position_of_the_loader(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        return initialize(
            model=SquareLoss(),
            training_data=torch.utils.data.TensorDataset(torch.arange(20.0).view(20, 1)),
            config={
                "train_batch_size": 2,
                "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
            },
        )[0]

    first = build()
    first.save_checkpoint(tmp_path, tag="start")
    for _ in range(13):
        first.train_batch()
    first.save_checkpoint(tmp_path)
    remaining = [next(first.training_dataloader.forever())[0].tolist() for _ in range(3)]

    second = build()
    second.load_checkpoint(tmp_path)
    messages = [record.getMessage() for record in caplog.records if "loader" in record.getMessage()]
    assert messages == [
        "the checkpoint has moved the training loader to micro-batch 3 of epoch 1, both counted "
        "from 0; do not skip again"
    ]
    assert [next(second.training_dataloader.forever())[0].tolist() for _ in range(3)] == remaining

    caplog.clear()
    second.load_checkpoint(tmp_path, tag="start")  # nothing to skip, nothing to log
    second.load_checkpoint(tmp_path, load_module_only=True)  # moves no loader
    assert caplog.records == []
