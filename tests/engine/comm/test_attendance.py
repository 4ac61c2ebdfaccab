"""A rank that does not come to a collective call is named, long before the call times out."""

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

import zerotrial
from tests.engine.ranks import run_on_ranks
from tests.waiting import until
from zerotrial.engine.comm import watchdog as module
from zerotrial.engine.comm.watchdog import VARIABLE, Attendance

LONG_S = 1e9
NO_CALL = r"is in no call of the engine|has made no such call yet"
SILENT = "does not answer"


class Lines(logging.Handler):
    """Writes what is logged to a file, which the rank that is late waits for."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        with self._path.open("a") as file:
            file.write(f"{record.getMessage()}\n")


def line_about(rank: int, path: Path, does: str) -> str:
    """Wait for the line that says that a rank is missed; others are of a machine that is slow.

    Args:
        rank: That is missed.
        path: Where it is said.
        does: A pattern for what it does meanwhile.
    """
    wanted = re.compile(rf"for rank {rank}, which has not come: rank {rank} ({does})")
    return until(
        f"rank {rank} is missed",
        lambda: [line for line in path.read_text().splitlines() if wanted.search(line)],
        not_yet=FileNotFoundError,
        details=lambda: path.read_text() if path.exists() else "nothing is said",
    )[0]


def engine_of(stage: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    return zerotrial.initialize(model=model, config=config)[0]


def backward(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, 4)).mean())


def calls(directory: Path) -> dict[str, tuple[int, Callable[[Any], Any], Callable[[Any], Any]]]:
    """Name of a case: stage, what all ranks do, and what one rank is late for."""
    saved = str(directory)
    losses: list[Any] = []

    def nothing(engine: Any) -> None:
        del engine

    def train(engine: Any) -> None:
        backward(engine)
        engine.step()

    def save(engine: Any) -> None:
        engine.save_checkpoint(saved, tag="t")

    return {
        "save_checkpoint": (1, nothing, save),
        "load_checkpoint": (1, save, lambda e: e.load_checkpoint(saved)),
        "export": (1, nothing, lambda e: e.export(directory / "model.safetensors")),
        "step": (0, backward, lambda e: e.step()),
        "train_batch": (0, nothing, train),
        "zero_grad": (2, backward, lambda e: e.zero_grad()),
        "forward": (3, nothing, lambda e: e(torch.ones(1, 4))),
        "backward": (
            3,
            lambda e: losses.append(e.scale(e(torch.ones(1, 4)).mean())),
            lambda _: losses.pop().backward(),
        ),
        "close": (3, nothing, lambda e: e.close()),
    }


def late(directory: str, names: list[str], who: int) -> dict[str, str]:
    """Let one rank be late for each call until another rank's line says so."""
    os.environ[VARIABLE] = "1"
    rank, base = dist.get_rank(), Path(directory)
    found = {}
    logger = logging.getLogger(module.__name__)
    for name in names:
        heard = base / f"{name}.log"
        handler = Lines(heard)
        stage, before, call = calls(base / name)[name]
        engine = engine_of(stage)
        before(engine)
        dist.barrier()
        logger.addHandler(handler)
        if rank == who:
            line_about(who, heard, NO_CALL)
        call(engine)
        logger.removeHandler(handler)
        engine.close()
        dist.barrier()
        found[name] = line_about(who, heard, NO_CALL)
    return found


def over_gloo(directory: str, names: list[str], who: int) -> tuple[dict[str, str], str]:
    """Ranks that share no memory."""
    from zerotrial.engine.comm import shared_memory

    shared_memory.host_name = lambda: f"host {dist.get_rank()}"
    kind = type(engine_of(1).stage._comm).__name__
    return late(directory, names, who), kind


@pytest.mark.processes
def test_every_call_that_all_must_make_names_the_rank_that_has_not_come(tmp_path: Path) -> None:
    names = list(calls(tmp_path))
    for found in run_on_ranks(late, 2, str(tmp_path), names, 1):
        for name, line in found.items():
            call = line.partition("(")[0]
            assert call in {name, "backward", "step"} if name == "train_batch" else call == name


@pytest.mark.processes
def test_ranks_without_shared_memory_are_named_by_the_lowest_that_waits(tmp_path: Path) -> None:
    names = ["save_checkpoint", "step"]
    for found, kind in run_on_ranks(over_gloo, 3, str(tmp_path), names, 0):
        assert kind == "GroupCommunicator"
        for name in names:
            line = found[name]
            assert line.startswith(f"{name}(): rank 1 has waited ")


def late_to_initialize(directory: str) -> str:
    """Let rank 1 be late for a second engine, and then a third one be made by all."""
    os.environ[VARIABLE] = "1"
    heard = Path(directory) / "initialize.log"
    logger, handler = logging.getLogger(module.__name__), Lines(heard)
    engines = [engine_of(1)]
    dist.barrier()
    logger.addHandler(handler)
    if dist.get_rank() == 1:
        line_about(1, heard, SILENT)
    engines += [engine_of(1), engine_of(3)]
    assert len(module._watcher._watched) == len(engines)
    for engine in engines:
        engine.close()
    dist.barrier()
    logger.removeHandler(handler)
    return line_about(1, heard, SILENT)


@pytest.mark.processes
def test_a_rank_that_does_not_come_to_initialize_is_named(tmp_path: Path) -> None:
    for line in run_on_ranks(late_to_initialize, 2, str(tmp_path)):
        assert line.startswith("initialize(): rank 0 has waited")


def test_a_rank_that_has_come_and_gone_on_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    first, second, store = pair()
    for one in (second, first):
        one.enter("initialize")
        one.come(store)
    second.close()
    for _ in range(3):
        first.look(store, 0.0)
    assert not caplog.records


def pair() -> tuple[Attendance, Attendance, HashStore]:
    return Attendance([0, 1], 0, "t"), Attendance([0, 1], 1, "t"), HashStore()


def ask(store: HashStore, calls: int) -> None:
    store.set("t/asked", str(calls))


def test_a_call_that_takes_long_with_all_there_is_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second, store = pair()
    with first.call("save_checkpoint"), second.call("save_checkpoint"):
        for _ in range(3):
            first.look(store, LONG_S)
            second.look(store, LONG_S)
            ask(store, 1)
        for _ in range(3):
            first.look(store, 0.0)
            second.look(store, 0.0)
    assert not caplog.records


def test_a_rank_in_another_call_is_said_to_be_there(caplog: pytest.LogCaptureFixture) -> None:
    first, second, store = pair()
    first.enter("save_checkpoint")
    second.enter("backward")
    ask(store, 1)
    second.look(store, LONG_S)
    first.look(store, 0.0)
    first.look(store, 0.0)
    mine = [r.getMessage() for r in caplog.records if "save_checkpoint(): rank 0" in r.message]
    assert len(mine) == 1
    assert "rank 1 is in backward()" in mine[0]


def test_a_rank_has_its_time_to_answer_and_one_that_does_so_later_is_told_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second, store = pair()
    first.enter("step")
    for _ in range(2):  # the seconds have passed while the machine slept
        first.look(store, 0.0)
    assert not caplog.records
    for _ in range(10):
        first.look(store, 0.0)
    (line,) = caplog.messages
    assert "rank 1 does not answer" in line

    def told() -> list[str]:
        second.look(store, LONG_S)
        first.look(store, 0.0)
        return caplog.messages

    until("it is told again", told, lambda lines: len(lines) > 1)
    for _ in range(20):
        told()
    assert "rank 1 has made no such call yet" in caplog.messages[1]
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("answers", [False, True], ids=["a silent rank", "a rank on its way"])
def test_who_is_missing_is_told_again_when_others_have_come(
    caplog: pytest.LogCaptureFixture, answers: bool
) -> None:
    store = HashStore()
    never, first, second = (Attendance([0, 1, 2], rank, "t") for rank in range(3))
    first.enter("step")

    def told() -> list[str]:
        for one in (never, second) if answers or second._calls else (never,):
            one.look(store, LONG_S)
        first.look(store, 0.0)
        return caplog.messages

    until("two ranks are missed", told)
    second.enter("step")
    until("one is missed", lambda: len(told()) > 1)
    for _ in range(20):
        told()
    both, one = caplog.messages
    assert "for 2 ranks (0, 2), which have not come" in both
    assert "for rank 0, which has not come" in one


def test_a_rank_that_has_gone_on_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    first, second, store = pair()
    for _ in range(2):
        with second.call("step"):
            pass
    first.enter("step")
    ask(store, 1)
    second.look(store, LONG_S)
    first.look(store, 0.0)
    assert not caplog.records


def test_an_answer_to_an_earlier_question_does_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second, store = pair()
    with first.call("step"):
        ask(store, 1)
        second.look(store, LONG_S)  # in no call
    with second.call("step"):
        pass
    first.enter("save_checkpoint")
    second.enter("save_checkpoint")
    first.look(store, LONG_S)
    ask(store, 2)
    first.look(store, LONG_S)
    second.look(store, LONG_S)
    first.look(store, 0.0)
    assert not caplog.records


def test_nobody_answers_when_nobody_asks() -> None:
    first, second, store = pair()
    with first.call("step"):
        for one in (first, second):
            one.look(store, LONG_S)
    assert store.num_keys() == 0


def test_calls_inside_of_a_call_are_a_part_of_it() -> None:
    first, _, store = pair()
    with first.call("save_checkpoint"), first.call("wait_for_checkpoint"):
        ask(store, 1)
        first.look(store, LONG_S)
    assert b"save_checkpoint" in store.get("t/0")
    first.look(store, LONG_S)
    assert b'"calls": 1' in store.get("t/0")


def test_zero_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    assert module._patience() == 0.0
    monkeypatch.setenv(VARIABLE, "soon")
    assert module._patience() == 20.0
