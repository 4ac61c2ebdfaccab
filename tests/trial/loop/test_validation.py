"""A validation ends where its loader says or when the trial is told to leave; a long one speaks."""

import itertools
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrial
from tests.engine.ranks import run_on_ranks
from tests.trial.helpers import (
    LineTrial,
    build,
    fit,
    last_checkpoint,
    make_settings,
    make_spec,
    metrics,
)
from zerolab.contract.wire import Directive
from zerotrial.loop import validation
from zerotrial.loop.console import PROGRESS
from zerotrial.loop.stop_reason import StopReason
from zerotrial.ranks import Distributed


class Repeating:
    """A loader that begins anew for ever, as DeepSpeed's RepeatingLoader does."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.drawn = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in itertools.chain.from_iterable(itertools.repeat(self.loader)):
            self.drawn += 1
            yield batch


class MeasuredRepeating(Repeating):
    def __len__(self) -> int:
        return len(self.loader)


class RepeatingTrial(LineTrial):
    kind: type[Repeating] = Repeating

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        context.disable_dataset_reproducibility_checks()

    def build_validation_data_loader(self) -> Any:
        self.loader = self.kind(list(zerotrial.DataLoader(range(6), batch_size=2)))
        return self.loader

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
        batch = next(dataloader_iter)
        return {"validation_loss": batch.float().mean()}


class MeasuredTrial(RepeatingTrial):
    kind = MeasuredRepeating


def test_a_loader_that_repeats_for_ever_is_read_as_often_as_its_length_says(
    tmp_path: Path,
) -> None:
    ending, trial = fit(make_spec(tmp_path), MeasuredTrial, make_settings(3))
    assert ending is StopReason.FINISHED
    assert trial.loader.drawn == 3
    assert metrics(tmp_path, "validation")[3]["validation_loss"] == 2.5


def test_a_whole_pass_in_one_call_ends_at_the_length_too(tmp_path: Path) -> None:
    class Trial(MeasuredTrial):
        def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
            return {"validation_loss": torch.cat(list(dataloader_iter)).float().mean()}

    fit(make_spec(tmp_path), Trial, make_settings(1))
    assert metrics(tmp_path, "validation")[1]["validation_loss"] == 2.5


class WholeTrial(RepeatingTrial):
    """Draws all of the loader by itself."""

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        assert data_loader.loader is self.loader.loader  # what the loader has is there
        batches = [self.evaluate_batch(iter([batch])) for batch in data_loader]
        return {
            "validation_loss": sum(batch["validation_loss"] for batch in batches) / len(batches)
        }


class MeasuredWholeTrial(WholeTrial):
    kind = MeasuredRepeating


class PassesTrial(MeasuredWholeTrial):
    """Draws its three batches again and again."""

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        for _ in range(30_000):
            super().evaluate_full_dataset(data_loader)
        raise AssertionError("not told to end")


@pytest.mark.parametrize(
    ("how", "kind", "measured"),
    [
        ("directive", RepeatingTrial, MeasuredTrial),
        ("sigterm", RepeatingTrial, MeasuredTrial),
        ("sigterm", WholeTrial, MeasuredWholeTrial),
        ("sigterm", PassesTrial, MeasuredWholeTrial),
    ],
)
def test_a_validation_without_end_is_left_when_the_trial_is_told_to(
    tmp_path: Path, how: str, kind: type[RepeatingTrial], measured: type[RepeatingTrial]
) -> None:
    controller, session = build(make_spec(tmp_path), kind, make_settings(5))
    trial = controller._trial
    evaluate = trial.evaluate_batch

    def told_at_batch_100(batches: Iterator[Any]) -> dict[str, Any]:
        if trial.loader.drawn == 100:
            if how == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                session._poller.directive = Directive("preempt", version=1)
        return evaluate(batches)

    trial.evaluate_batch = told_at_batch_100
    ending = controller.run()
    session.close(ending)
    assert (ending, ending.exit_code) == (StopReason.PREEMPTED, 66)
    assert trial.engine.module.training
    latest = last_checkpoint(tmp_path)
    assert latest is not None
    assert latest.steps_completed == 5
    assert not metrics(tmp_path, "validation")

    ending, trial = fit(make_spec(tmp_path, latest=latest), measured, make_settings(5))
    assert ending is StopReason.FINISHED
    assert list(metrics(tmp_path, "validation")) == [5]
    assert trial.loader.drawn == 3
    assert metrics(tmp_path, "validation")[5]["validation_loss"] == 2.5


def test_a_run_that_was_taken_over_leaves_its_validation_and_saves_nothing(tmp_path: Path) -> None:
    controller, session = build(make_spec(tmp_path), RepeatingTrial, make_settings(5))
    controller._next_agreement = 1000
    session._reporter.stale.set()
    ending = controller.run()
    session.close(ending)
    assert ending is StopReason.STALE
    assert last_checkpoint(tmp_path) is None


class Gathered(zerotrial.MetricReducer):
    def reset(self) -> None:
        self.values: list[float] = []

    def per_slot_reduce(self) -> Any:
        return self.values

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        return float(sum(value for of_rank in per_slot_metrics for value in of_rank))


def test_a_reducer_forgets_what_an_interrupted_validation_gave_it(tmp_path: Path) -> None:
    controller, session = build(make_spec(tmp_path), RepeatingTrial, make_settings(5))
    trial = controller._trial
    reducer = trial.context.wrap_reducer(Gathered(), "gathered")
    evaluate = trial.evaluate_batch

    def gather(batches: Iterator[Any]) -> dict[str, Any]:
        reducer.values.append(100.0)
        if trial.loader.drawn == 20:
            session._poller.directive = Directive("preempt", version=1)
        return evaluate(batches)

    trial.evaluate_batch = gather
    session.close(controller.run())
    assert reducer.values == []


class UnevenTrial(RepeatingTrial):
    """Rank 0 has two batches to validate; rank 1 has no end of them, and gets SIGTERM."""

    def build_validation_data_loader(self) -> Any:
        loader = super().build_validation_data_loader()
        return loader if self.context.distributed.rank else [torch.zeros(2), torch.ones(2)]

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
        if self.context.distributed.rank and self.loader.drawn == 50:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().evaluate_batch(dataloader_iter)


class LockstepTrial(WholeTrial):
    """Both ranks need each other's forward passes, and rank 1 alone gets SIGTERM."""

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
        if self.context.distributed.rank and self.loader.drawn == 50:
            os.kill(os.getpid(), signal.SIGTERM)
        batch = next(dataloader_iter)
        return {"validation_loss": self.engine(batch[:, None].float()).mean()}


class LockstepPassesTrial(PassesTrial, LockstepTrial):
    pass


def leave_together(directory: str) -> list[tuple[str, int]]:
    ranks = Distributed.from_environment(cuda=False)
    found = []
    gathers = {"stage": 3}
    for kind, hparams in (
        (UnevenTrial, {}),
        (LockstepTrial, gathers),
        (LockstepPassesTrial, gathers),
    ):
        path = Path(directory) / kind.__name__
        spec = make_spec(path, hparams, slots=2, run_dir=str(path / f"run{ranks.rank}"))
        ending, _ = fit(spec, kind, make_settings(5), ranks)
        latest = last_checkpoint(Path(spec.run_dir)) if ranks.rank == 0 else None
        found.append((ending.name, latest.steps_completed if latest else 0))
    return found


@pytest.mark.processes
def test_ranks_leave_a_validation_together_whatever_their_data(tmp_path: Path) -> None:
    found = run_on_ranks(leave_together, 2, str(tmp_path))
    assert found == [3 * [("PREEMPTED", 5)], 3 * [("PREEMPTED", 0)]]


class UnmeasuredTrial(RepeatingTrial):
    """Three batches of a loader that does not say how many it has."""

    def build_validation_data_loader(self) -> Any:
        batches = super().build_validation_data_loader().loader

        class Stream:
            def __iter__(self) -> Iterator[Any]:
                return iter(batches)

        return Stream()


class DrawingTrial(MeasuredTrial):
    """Draws a pass in one call."""

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
        return {"validation_loss": torch.cat(list(dataloader_iter)).float().mean()}


class TwoPassTrial(MeasuredWholeTrial):
    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        super().evaluate_full_dataset(data_loader)
        return super().evaluate_full_dataset(data_loader)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (MeasuredTrial, ["0 of 3", "1 of 3", "2 of 3"]),
        (DrawingTrial, ["0 of 3", "1 of 3", "2 of 3", "3 of 3"]),
        (UnmeasuredTrial, ["0", "1", "2"]),
        (MeasuredWholeTrial, ["0 of 3", "1 of 3", "2 of 3"]),
        (TwoPassTrial, ["0 of 3", "1 of 3", "2 of 3", "3 of 3", "4", "5"]),
    ],
)
def test_a_validation_says_how_far_it_is(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[RepeatingTrial],
    told: list[str],
) -> None:
    monkeypatch.setattr(validation, "_PROGRESS_INTERVAL_S", 0.0)
    with caplog.at_level("INFO"):
        fit(make_spec(tmp_path), kind, make_settings(1))
    lines = [line for line in caplog.messages if line.startswith("validating")]
    assert [line.partition(" batches in ")[0] for line in lines] == [
        f"validating: {count}" for count in told
    ]
    assert [line.endswith(" left") for line in lines] == [
        count.endswith(" of 3") and count[0] in "12" for count in told
    ]


class SlowTrial(LineTrial):
    """Two hundred batches of a millisecond each."""

    def build_validation_data_loader(self) -> Any:
        return zerotrial.DataLoader(range(400 * self.context.distributed.size), batch_size=2)

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
        end = time.monotonic() + 0.001
        batch = next(dataloader_iter)
        while time.monotonic() < end:
            pass
        return {"validation_loss": batch.float().mean()}


def test_it_says_so_once_a_minute_and_not_at_every_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level("INFO"):
        fit(make_spec(tmp_path / "short"), SlowTrial, make_settings(1))
        assert "validating" not in caplog.text
        monkeypatch.setattr(validation, "_PROGRESS_INTERVAL_S", 0.05)
        started = time.monotonic()
        fit(make_spec(tmp_path / "long"), SlowTrial, make_settings(1))
    lines = [line for line in caplog.messages if line.startswith("validating")]
    assert 1 <= len(lines) <= (time.monotonic() - started) / 0.05
    assert all(" of 200 batches in " in line for line in lines)


def lines_of_each_rank(directory: str) -> tuple[list[str], dict[str, Any]]:
    ranks = Distributed.from_environment(cuda=False)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    PROGRESS.addHandler(handler)
    PROGRESS.setLevel(logging.INFO)
    validation._PROGRESS_INTERVAL_S = 0.05 if ranks.rank else 60.0
    spec = make_spec(Path(directory), slots=2, run_dir=f"{directory}/run{ranks.rank}")
    fit(spec, SlowTrial, make_settings(1), ranks)
    return lines, metrics(Path(spec.run_dir), "validation")[1] if ranks.rank == 0 else {}


@pytest.mark.processes
def test_each_rank_speaks_for_itself_and_the_metrics_stay_the_same(tmp_path: Path) -> None:
    (quiet, found), (spoken, _) = run_on_ranks(lines_of_each_rank, 2, str(tmp_path))
    assert not quiet
    assert spoken
    assert all(" of 200 batches in " in line for line in spoken)
    assert found["validation_loss"] == 399.5
