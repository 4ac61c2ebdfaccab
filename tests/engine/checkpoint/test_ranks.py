"""Saving and loading on several ranks: errors are raised on all ranks; each keeps its state."""

import itertools
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.engine.checkpoint.test_one_rank import files_of_at_most
from tests.engine.checkpointing import Net, Ranks, all_states, make_engine, probe, train
from tests.engine.ranks import run_on_ranks
from zerolab.errors import ZerolabError
from zerotrial.engine import initialize


def error_of(action: Any) -> str:
    try:
        action()
    except ZerolabError as error:
        return str(error)
    return "no error"


class Lines(logging.Handler):
    """Log handler that keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def save_under_different_tags(directory: Path, rule: str) -> tuple[str, list[str], list[str]]:
    engine = make_engine(1, checkpoint={"tag_validation": rule})
    log = Lines()
    logging.getLogger("zerotrial").addHandler(log)
    tag = f"t{dist.get_rank()}"
    text = error_of(lambda: engine.save_checkpoint(directory / rule, tag=tag))
    logging.getLogger("zerotrial").removeHandler(log)
    engine.close()
    dist.barrier()
    return text, log.lines, sorted(path.name for path in directory.glob(f"{rule}/*"))


def one_rank_cannot_write(directory: Path, *, in_background: bool) -> list[Any]:
    engine = make_engine(2)
    train(engine, 1)
    engine.save_checkpoint(directory)

    def save() -> None:
        engine.save_checkpoint(directory, tag="never", async_save=in_background)
        engine.wait_for_checkpoint()

    limit = 1000 if dist.get_rank() == 1 else 10**9
    with files_of_at_most(limit):
        text = error_of(save)
    dist.barrier()
    remaining = sorted(path.name for path in directory.iterdir())
    losses = train(engine, 1)
    engine.load_checkpoint(directory)
    same = train(engine, 1) == losses
    engine.close()
    return [text, remaining, same]


def remove_one_file(directory: Path) -> list[str]:
    engine = make_engine(3)
    train(engine, 1)
    engine.save_checkpoint(directory)
    dist.barrier()
    path = directory / "global_step1" / "rank-00001-000.safetensors"
    if dist.get_rank() == 0:
        path.rename(path.with_suffix(".away"))
    dist.barrier()
    missing = error_of(lambda: engine.load_checkpoint(directory))
    dist.barrier()
    if dist.get_rank() == 0:
        content = bytearray(path.with_suffix(".away").read_bytes())
        content[-1] ^= 1
        path.write_bytes(bytes(content))
    dist.barrier()
    flipped = error_of(lambda: engine.load_checkpoint(directory))
    nowhere = error_of(lambda: engine.load_checkpoint(directory / "nowhere"))
    engine.close()
    return [missing, flipped, nowhere]


def local_buffers_and_generators(directory: Path, stage: int) -> list[bool]:
    """Each rank draws and counts for itself; the restart is bit-identical nevertheless."""
    rank = dist.get_rank()
    config: dict[str, Any] = {"dropout": 0.5, "bf16": {"enabled": True}}
    engine = make_engine(stage, **config)
    torch.manual_seed(100 + rank)
    random.seed(rank)
    np.random.seed(rank)
    train(engine, 2)
    engine.module.calls.fill_(10 + rank)
    engine.save_checkpoint(directory, async_save=True)
    expected = (train(engine, 3), random.random(), np.random.rand())
    states = all_states(engine)
    engine.wait_for_checkpoint()
    engine.close()
    again = make_engine(stage, seed=1, **config)
    again.load_checkpoint(directory)
    calls = int(again.module.calls) == 10 + rank
    actual = (train(again, 3), random.random(), np.random.rand())
    equal = [torch.equal(state, states[key]) for key, state in all_states(again).items()]
    again.close()
    return [calls, actual == expected, all(equal)]


def parameter_groups_with_options(directory: Path) -> list[bool]:
    """Restore manual learning rates of each group at another stage."""
    results = []
    for stage, other in ((0, 2), (2, 3), (3, 1)):
        path = directory / f"{stage}"
        engine = make_engine(stage, scheduler=None)
        engine.optimizer.param_groups[0]["lr"] = 0.007
        train(engine, 2)
        engine.save_checkpoint(path)
        again = make_engine(other, scheduler=None, seed=1)
        again.load_checkpoint(path)
        results.append(again.get_lr() == [0.007] and probe(again) == probe(engine))
        engine.close()
        again.close()
    return results


def loader_engine(stage: int) -> Any:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.arange(40.0)[:, None].expand(40, 6).contiguous())
    return initialize(
        model=Net(),
        training_data=data,
        config={
            "train_batch_size": 8,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": stage},
        },
    )[0]


def rows_of(engine: Any, steps: int) -> list[list[float]]:
    batches = engine.training_dataloader.forever()
    rows = [[float(v) for v in next(batches)[0][:, 0]] for _ in range(steps)]
    gathered: list[Any] = [None] * engine.dp_world_size
    if engine.group is None:
        return [sorted(row) for row in rows]
    dist.all_gather_object(gathered, rows)
    return [sorted(itertools.chain(*parts)) for parts in zip(*gathered, strict=True)]


def read_on(directory: str, save: bool) -> list[list[list[float]]]:
    """Rows after a checkpoint in an epoch's middle, and after one at its end."""
    results = []
    for step in (3, 5, 7):  # of 5 in an epoch
        engine = loader_engine(1)
        if save:
            rows_of(engine, step)
            engine.save_checkpoint(directory, tag=f"{step}")
        else:
            engine.load_checkpoint(directory, tag=f"{step}")
            engine.save_checkpoint(directory, tag=f"{step} again")  # before anything is read
            engine.load_checkpoint(directory, tag=f"{step} again")
        results.append(rows_of(engine, 6))
        engine.close()
    return results


def two_parts_of_a_model(directory: Path) -> list[str]:
    """Each rank alone holds one part of the model."""
    group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    mpu = Ranks(group, dist.group.WORLD)
    engine = make_engine(1, mpu=mpu, seed=dist.get_rank())
    train(engine, 1)
    together = error_of(lambda: engine.save_checkpoint(directory))
    part_directory = directory / f"part{dist.get_rank()}"
    engine.save_checkpoint(part_directory)
    loss = probe(engine)
    train(engine, 1)
    engine.load_checkpoint(part_directory)
    apart = "the same" if probe(engine) == loss else "another"
    engine.close()
    return [together, apart]


def on_two_ranks(directory: str) -> dict[str, Any]:
    base = Path(directory)
    return {
        "tags": {
            rule: save_under_different_tags(base / "tags", rule)
            for rule in ("Fail", "Warn", "ignore")
        },
        "full": one_rank_cannot_write(base / "full", in_background=False),
        "full behind": one_rank_cannot_write(base / "behind", in_background=True),
        "damaged": remove_one_file(base / "damaged"),
        "own": [local_buffers_and_generators(base / f"own{stage}", stage) for stage in range(4)],
        "groups": parameter_groups_with_options(base / "groups"),
        "parts": two_parts_of_a_model(base / "parts"),
        "rows": (str(base / "rows"), read_on(str(base / "rows"), save=True)),
    }


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(on_two_ranks, 2, str(tmp_path_factory.mktemp("ranks")))


@pytest.mark.processes
def test_tag_validation(
    rank_results: list[dict[str, Any]],
) -> None:
    for result in rank_results:
        text, _, files = result["tags"]["Fail"]
        assert "must save under one tag, got ['t0', 't1']" in text
        assert files == []
        text, lines, files = result["tags"]["Warn"]
        assert text == "no error"
        assert len(lines) == 1
        assert "rank 0's is used" in lines[0]
        assert files == ["latest", "t0"]
        assert result["tags"]["ignore"] == ("no error", [], ["latest", "t0"])


@pytest.mark.processes
@pytest.mark.parametrize("how", ["full", "full behind"])
def test_failed_write_of_one_rank_fails_on_all(
    rank_results: list[dict[str, Any]], how: str
) -> None:
    for result in rank_results:
        text, remaining, same = result[how]
        assert "could not write" in text
        assert "never" in text
        assert remaining == ["global_step1", "latest"]
        assert same
    assert rank_results[0][how][0].startswith("rank 1: ")


@pytest.mark.processes
def test_damaged_file_of_one_rank_fails_on_all(rank_results: list[dict[str, Any]]) -> None:
    for result in rank_results:
        missing, flipped, nowhere = result["damaged"]
        assert "rank-00001-000.safetensors: missing" in missing
        assert "rank-00001-000.safetensors: damaged" in flipped
        assert "nowhere: no such directory" in nowhere


@pytest.mark.processes
def test_generators_and_buffers_of_each_rank(
    rank_results: list[dict[str, Any]],
) -> None:
    for result in rank_results:
        assert result["own"] == [[True, True, True]] * 4


@pytest.mark.processes
def test_manual_learning_rates_at_another_stage(
    rank_results: list[dict[str, Any]],
) -> None:
    for result in rank_results:
        assert result["groups"] == [True, True, True]


@pytest.mark.processes
def test_model_parts_need_separate_directories(rank_results: list[dict[str, Any]]) -> None:
    for result in rank_results:
        together, apart = result["parts"]
        assert "save_dir: must be another directory for each part" in together
        assert apart == "the same"


@pytest.mark.processes
def test_loader_resumes_at_another_world_size(
    rank_results: list[dict[str, Any]],
) -> None:
    path, expected = rank_results[0]["rows"]
    assert read_on(path, save=False) == expected
