"""The watchdog names ranks missing from a collective call long before its timeout."""

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
from zerotrial.extensions.watchdog import missing_ranks as module
from zerotrial.extensions.watchdog.missing_ranks import VARIABLE, CollectiveWatchdog

LONG_S = 1e9
NO_CALL = r"is in no call of the engine|has made no such call yet"
SILENT = "does not answer"


class Lines(logging.Handler):
    """Log handler that writes to a file for which the late rank waits."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        with self._path.open("a") as file:
            file.write(f"{record.getMessage()}\n")


def line_about(rank: int, path: Path, does: str) -> str:
    """Wait for the line about a missing rank; a slow machine may log others.

    Args:
        rank: Missing rank.
        path: Log file.
        does: Pattern of its status.
    """
    pattern = re.compile(rf"for rank {rank}, which has not called it: rank {rank} ({does})")
    return until(
        f"rank {rank} is missed",
        lambda: [line for line in path.read_text().splitlines() if pattern.search(line)],
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
    """Name of a case: stage, the action of all ranks, and the call that one rank delays."""
    saved = str(directory)
    losses: list[Any] = []

    def no_action(engine: Any) -> None:
        del engine

    def train(engine: Any) -> None:
        backward(engine)
        engine.step()

    def save(engine: Any) -> None:
        engine.save_checkpoint(saved, tag="t")

    return {
        "save_checkpoint": (1, no_action, save),
        "load_checkpoint": (1, save, lambda e: e.load_checkpoint(saved)),
        "export": (1, no_action, lambda e: e.export(directory / "model.safetensors")),
        "step": (0, backward, lambda e: e.step()),
        "train_batch": (0, no_action, train),
        "zero_grad": (2, backward, lambda e: e.zero_grad()),
        "forward": (3, no_action, lambda e: e(torch.ones(1, 4))),
        "backward": (
            3,
            lambda e: losses.append(e.scale(e(torch.ones(1, 4)).mean())),
            lambda _: losses.pop().backward(),
        ),
        "close": (3, no_action, lambda e: e.close()),
    }


def delayed_call(directory: str, names: list[str], who: int) -> dict[str, str]:
    """Delay one rank at each call until another rank logs a warning."""
    os.environ[VARIABLE] = "1"
    rank, base = dist.get_rank(), Path(directory)
    lines = {}
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
        lines[name] = line_about(who, heard, NO_CALL)
    return lines


def over_gloo(directory: str, names: list[str], who: int) -> tuple[dict[str, str], str]:
    """Ranks that share no memory."""
    from zerotrial.extensions.shared_memory import collectives

    collectives.host_name = lambda: f"host {dist.get_rank()}"
    kind = type(engine_of(1).stage._comm).__name__
    return delayed_call(directory, names, who), kind


@pytest.mark.processes
def test_every_collective_call_names_the_missing_rank(tmp_path: Path) -> None:
    names = list(calls(tmp_path))
    for lines in run_on_ranks(delayed_call, 2, str(tmp_path), names, 1):
        for name, line in lines.items():
            call = line.partition("(")[0]
            assert call in {name, "backward", "step"} if name == "train_batch" else call == name


@pytest.mark.processes
def test_gloo_ranks_are_reported_by_the_lowest_waiting(tmp_path: Path) -> None:
    names = ["save_checkpoint", "step"]
    for lines, kind in run_on_ranks(over_gloo, 3, str(tmp_path), names, 0):
        assert kind == "GroupCommunicator"
        for name in names:
            line = lines[name]
            assert line.startswith(f"{name}(): rank 1 has waited ")


def late_to_initialize(directory: str) -> str:
    """Delay rank 1 at the second engine; then build a third one on all ranks."""
    os.environ[VARIABLE] = "1"
    heard = Path(directory) / "initialize.log"
    logger, handler = logging.getLogger(module.__name__), Lines(heard)
    engines = [engine_of(1)]
    dist.barrier()
    logger.addHandler(handler)
    if dist.get_rank() == 1:
        line_about(1, heard, SILENT)
    engines += [engine_of(1), engine_of(3)]
    assert len(module._polling_thread._watched) == len(engines)
    for engine in engines:
        engine.close()
    dist.barrier()
    logger.removeHandler(handler)
    return line_about(1, heard, SILENT)


@pytest.mark.processes
def test_rank_missing_from_initialize_is_named(tmp_path: Path) -> None:
    for line in run_on_ranks(late_to_initialize, 2, str(tmp_path)):
        assert line.startswith("initialize(): rank 0 has waited")


def test_finished_rank_is_not_missing(caplog: pytest.LogCaptureFixture) -> None:
    first, second, store = pair()
    for watchdog in (second, first):
        watchdog.enter("initialize")
        watchdog.announce(store)
    second.close()
    for _ in range(3):
        first.poll(store, 0.0)
    assert not caplog.records


def pair() -> tuple[CollectiveWatchdog, CollectiveWatchdog, HashStore]:
    return CollectiveWatchdog([0, 1], 0, "t"), CollectiveWatchdog([0, 1], 1, "t"), HashStore()


def ask(store: HashStore, calls: int) -> None:
    store.set("t/asked", str(calls))


def test_slow_call_with_all_ranks_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second, store = pair()
    with first.call("save_checkpoint"), second.call("save_checkpoint"):
        for _ in range(3):
            first.poll(store, LONG_S)
            second.poll(store, LONG_S)
            ask(store, 1)
        for _ in range(3):
            first.poll(store, 0.0)
            second.poll(store, 0.0)
    assert not caplog.records


def test_rank_in_another_call_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    first, second, store = pair()
    first.enter("save_checkpoint")
    second.enter("backward")
    ask(store, 1)
    second.poll(store, LONG_S)
    first.poll(store, 0.0)
    first.poll(store, 0.0)
    messages = [r.getMessage() for r in caplog.records if "save_checkpoint(): rank 0" in r.message]
    assert len(messages) == 1
    assert "rank 1 is in backward()" in messages[0]


def test_slow_rank_has_time_to_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second, store = pair()
    first.enter("step")
    for _ in range(2):  # the seconds have passed while the machine slept
        first.poll(store, 0.0)
    assert not caplog.records
    for _ in range(10):
        first.poll(store, 0.0)
    (line,) = caplog.messages
    assert "rank 1 does not answer" in line

    def warnings() -> list[str]:
        second.poll(store, LONG_S)
        first.poll(store, 0.0)
        return caplog.messages

    until("the warning is repeated", warnings, lambda lines: len(lines) > 1)
    for _ in range(20):
        warnings()
    assert "rank 1 has made no such call yet" in caplog.messages[1]
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("responds", [False, True], ids=["a silent rank", "a rank on its way"])
def test_warning_repeats_when_missing_ranks_change(
    caplog: pytest.LogCaptureFixture, responds: bool
) -> None:
    store = HashStore()
    never, first, second = (CollectiveWatchdog([0, 1, 2], rank, "t") for rank in range(3))
    first.enter("step")

    def warnings() -> list[str]:
        for watchdog in (never, second) if responds or second._calls else (never,):
            watchdog.poll(store, LONG_S)
        first.poll(store, 0.0)
        return caplog.messages

    until("two ranks are missed", warnings)
    second.enter("step")
    until("one is missed", lambda: len(warnings()) > 1)
    for _ in range(20):
        warnings()
    first_message, second_message = caplog.messages
    assert "for 2 ranks (0, 2), which have not called it" in first_message
    assert "for rank 0, which has not called it" in second_message


def test_rank_beyond_the_call_is_not_missing(caplog: pytest.LogCaptureFixture) -> None:
    first, second, store = pair()
    for _ in range(2):
        with second.call("step"):
            pass
    first.enter("step")
    ask(store, 1)
    second.poll(store, LONG_S)
    first.poll(store, 0.0)
    assert not caplog.records


def test_answer_to_earlier_request_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second, store = pair()
    with first.call("step"):
        ask(store, 1)
        second.poll(store, LONG_S)  # in no call
    with second.call("step"):
        pass
    first.enter("save_checkpoint")
    second.enter("save_checkpoint")
    first.poll(store, LONG_S)
    ask(store, 2)
    first.poll(store, LONG_S)
    second.poll(store, LONG_S)
    first.poll(store, 0.0)
    assert not caplog.records


def test_no_status_is_published_without_request() -> None:
    first, second, store = pair()
    with first.call("step"):
        for watchdog in (first, second):
            watchdog.poll(store, LONG_S)
    assert store.num_keys() == 0


def test_nested_call_is_part_of_outer_call() -> None:
    first, _, store = pair()
    with first.call("save_checkpoint"), first.call("wait_for_checkpoint"):
        ask(store, 1)
        first.poll(store, LONG_S)
    assert b"save_checkpoint" in store.get("t/0")
    first.poll(store, LONG_S)
    assert b'"calls": 1' in store.get("t/0")


def test_zero_disables_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    assert module._timeout_s() == 0.0
    monkeypatch.setenv(VARIABLE, "soon")
    assert module._timeout_s() == 20.0
