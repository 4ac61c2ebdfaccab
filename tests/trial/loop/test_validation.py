"""Validation: length of the pass, interruption by stop requests, and progress messages."""

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
from zerolab.contract.messages import Directive
from zerotrial.loop import validation
from zerotrial.loop.console import PROGRESS
from zerotrial.loop.stop_reason import StopReason
from zerotrial.ranks import Distributed


class Repeating:
    """Loader that repeats forever, as DeepSpeed's RepeatingLoader does."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.drawn = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in itertools.chain.from_iterable(itertools.repeat(self.loader)):
            self.drawn += 1
            yield batch


class SizedRepeating(Repeating):
    def __len__(self) -> int:
        return len(self.loader)


class RepeatingTrial(LineTrial):
    trial_class: type[Repeating] = Repeating

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        context.disable_dataset_reproducibility_checks()

    def build_validation_data_loader(self) -> Any:
        self.loader = self.trial_class(list(zerotrial.DataLoader(range(6), batch_size=2)))
        return self.loader

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
        batch = next(dataloader_iter)
        return {"validation_loss": batch.float().mean()}


class SizedTrial(RepeatingTrial):
    trial_class = SizedRepeating


def test_repeating_loader_stops_at_its_length(
    tmp_path: Path,
) -> None:
    stop_reason, trial = fit(make_spec(tmp_path), SizedTrial, make_settings(3))
    assert stop_reason is StopReason.FINISHED
    assert trial.loader.drawn == 3
    assert metrics(tmp_path, "validation")[3]["validation_loss"] == 2.5


def test_pass_in_one_call_stops_at_the_length(tmp_path: Path) -> None:
    class Trial(SizedTrial):
        def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
            return {"validation_loss": torch.cat(list(dataloader_iter)).float().mean()}

    fit(make_spec(tmp_path), Trial, make_settings(1))
    assert metrics(tmp_path, "validation")[1]["validation_loss"] == 2.5


class FullDatasetTrial(RepeatingTrial):
    """Trial that overrides evaluate_full_dataset."""

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        assert data_loader.loader is self.loader.loader  # attributes of the loader are accessible
        batches = [self.evaluate_batch(iter([batch])) for batch in data_loader]
        return {
            "validation_loss": sum(batch["validation_loss"] for batch in batches) / len(batches)
        }


class SizedFullDatasetTrial(FullDatasetTrial):
    trial_class = SizedRepeating


class ManyPassesTrial(SizedFullDatasetTrial):
    """Trial that draws its three batches many times."""

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        for _ in range(30_000):
            super().evaluate_full_dataset(data_loader)
        raise AssertionError("not interrupted")


@pytest.mark.parametrize(
    ("method", "trial_class", "resumed_class"),
    [
        ("directive", RepeatingTrial, SizedTrial),
        ("sigterm", RepeatingTrial, SizedTrial),
        ("sigterm", FullDatasetTrial, SizedFullDatasetTrial),
        ("sigterm", ManyPassesTrial, SizedFullDatasetTrial),
    ],
)
def test_preemption_interrupts_validation(
    tmp_path: Path,
    method: str,
    trial_class: type[RepeatingTrial],
    resumed_class: type[RepeatingTrial],
) -> None:
    controller, session = build(make_spec(tmp_path), trial_class, make_settings(5))
    trial = controller._trial
    evaluate = trial.evaluate_batch

    def preempt_at_batch_100(batches: Iterator[Any]) -> dict[str, Any]:
        if trial.loader.drawn == 100:
            if method == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                session._poller.directive = Directive("preempt", version=1)
        return evaluate(batches)

    trial.evaluate_batch = preempt_at_batch_100
    stop_reason = controller.run()
    session.close(stop_reason)
    assert (stop_reason, stop_reason.exit_code) == (StopReason.PREEMPTED, 66)
    assert trial.engine.module.training
    latest = last_checkpoint(tmp_path)
    assert latest is not None
    assert latest.steps_completed == 5
    assert not metrics(tmp_path, "validation")

    stop_reason, trial = fit(make_spec(tmp_path, latest=latest), resumed_class, make_settings(5))
    assert stop_reason is StopReason.FINISHED
    assert list(metrics(tmp_path, "validation")) == [5]
    assert trial.loader.drawn == 3
    assert metrics(tmp_path, "validation")[5]["validation_loss"] == 2.5


def test_superseded_run_interrupts_validation(tmp_path: Path) -> None:
    controller, session = build(make_spec(tmp_path), RepeatingTrial, make_settings(5))
    controller._next_agreement = 1000
    session._reporter.stale.set()
    stop_reason = controller.run()
    session.close(stop_reason)
    assert stop_reason is StopReason.STALE
    assert last_checkpoint(tmp_path) is None


class ListReducer(zerotrial.MetricReducer):
    def reset(self) -> None:
        self.values: list[float] = []

    def per_slot_reduce(self) -> Any:
        return self.values

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        return float(sum(value for values in per_slot_metrics for value in values))


def test_interrupted_validation_resets_reducers(tmp_path: Path) -> None:
    controller, session = build(make_spec(tmp_path), RepeatingTrial, make_settings(5))
    trial = controller._trial
    reducer = trial.context.wrap_reducer(ListReducer(), "gathered")
    evaluate = trial.evaluate_batch

    def add_value(batches: Iterator[Any]) -> dict[str, Any]:
        reducer.values.append(100.0)
        if trial.loader.drawn == 20:
            session._poller.directive = Directive("preempt", version=1)
        return evaluate(batches)

    trial.evaluate_batch = add_value
    session.close(controller.run())
    assert reducer.values == []


class UnevenTrial(RepeatingTrial):
    """Rank 0 has two validation batches; rank 1 has endless ones, and gets SIGTERM."""

    def build_validation_data_loader(self) -> Any:
        loader = super().build_validation_data_loader()
        return loader if self.context.distributed.rank else [torch.zeros(2), torch.ones(2)]

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
        if self.context.distributed.rank and self.loader.drawn == 50:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().evaluate_batch(dataloader_iter)


class LockstepTrial(FullDatasetTrial):
    """Trial with collective forward passes; only rank 1 gets SIGTERM."""

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
        if self.context.distributed.rank and self.loader.drawn == 50:
            os.kill(os.getpid(), signal.SIGTERM)
        batch = next(dataloader_iter)
        return {"validation_loss": self.engine(batch[:, None].float()).mean()}


class LockstepManyPassesTrial(ManyPassesTrial, LockstepTrial):
    pass


def run_interrupted_validations(directory: str) -> list[tuple[str, int]]:
    ranks = Distributed.from_environment(cuda=False)
    results = []
    stage_3 = {"stage": 3}
    for trial_class, hparams in (
        (UnevenTrial, {}),
        (LockstepTrial, stage_3),
        (LockstepManyPassesTrial, stage_3),
    ):
        path = Path(directory) / trial_class.__name__
        spec = make_spec(path, hparams, slots=2, run_dir=str(path / f"run{ranks.rank}"))
        stop_reason, _ = fit(spec, trial_class, make_settings(5), ranks)
        latest = last_checkpoint(Path(spec.run_dir)) if ranks.rank == 0 else None
        results.append((stop_reason.name, latest.steps_completed if latest else 0))
    return results


@pytest.mark.processes
def test_ranks_interrupt_validation_together(tmp_path: Path) -> None:
    results = run_on_ranks(run_interrupted_validations, 2, str(tmp_path))
    assert results == [3 * [("PREEMPTED", 5)], 3 * [("PREEMPTED", 0)]]


class UnsizedTrial(RepeatingTrial):
    """Trial with a loader of three batches and no length."""

    def build_validation_data_loader(self) -> Any:
        batches = super().build_validation_data_loader().loader

        class Stream:
            def __iter__(self) -> Iterator[Any]:
                return iter(batches)

        return Stream()


class SinglePassTrial(SizedTrial):
    """Trial that draws a full pass in one call."""

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
        return {"validation_loss": torch.cat(list(dataloader_iter)).float().mean()}


class TwoPassTrial(SizedFullDatasetTrial):
    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        super().evaluate_full_dataset(data_loader)
        return super().evaluate_full_dataset(data_loader)


@pytest.mark.parametrize(
    ("trial_class", "expected"),
    [
        (SizedTrial, ["0 of 3", "1 of 3", "2 of 3"]),
        (SinglePassTrial, ["0 of 3", "1 of 3", "2 of 3", "3 of 3"]),
        (UnsizedTrial, ["0", "1", "2"]),
        (SizedFullDatasetTrial, ["0 of 3", "1 of 3", "2 of 3"]),
        (TwoPassTrial, ["0 of 3", "1 of 3", "2 of 3", "3 of 3", "4", "5"]),
    ],
)
def test_validation_logs_progress(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    trial_class: type[RepeatingTrial],
    expected: list[str],
) -> None:
    monkeypatch.setattr(validation, "_PROGRESS_INTERVAL_S", 0.0)
    with caplog.at_level("INFO"):
        fit(make_spec(tmp_path), trial_class, make_settings(1))
    lines = [line for line in caplog.messages if line.startswith("validating")]
    assert [line.partition(" batches in ")[0] for line in lines] == [
        f"validating: {count}" for count in expected
    ]
    assert [line.endswith(" left") for line in lines] == [
        count.endswith(" of 3") and count[0] in "12" for count in expected
    ]


class SlowTrial(LineTrial):
    """Trial with 200 validation batches of a millisecond each."""

    def build_validation_data_loader(self) -> Any:
        return zerotrial.DataLoader(range(400 * self.context.distributed.size), batch_size=2)

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
        deadline = time.monotonic() + 0.001
        batch = next(dataloader_iter)
        while time.monotonic() < deadline:
            pass
        return {"validation_loss": batch.float().mean()}


def test_validation_progress_is_logged_once_per_interval(
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


def collect_progress_lines(directory: str) -> tuple[list[str], dict[str, Any]]:
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
def test_each_rank_logs_its_own_progress(tmp_path: Path) -> None:
    (unlogged, results), (logged, _) = run_on_ranks(collect_progress_lines, 2, str(tmp_path))
    assert not unlogged
    assert logged
    assert all(" of 200 batches in " in line for line in logged)
    assert results["validation_loss"] == 399.5
