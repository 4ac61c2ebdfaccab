"""Runs that pause at the searcher's limit, and runs that continue from there."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import zerolab.core
from tests.trial.helpers import LineTrial, fit, last_checkpoint, make_settings, make_spec, metrics
from zerolab.contract.outcome import read_reason
from zerolab.contract.spec import EXIT_REACHED, FitSpec, LengthSpec, write_run_spec
from zerotrial import Batch, Epoch
from zerotrial.loop.settings import FitSettings
from zerotrial.loop.stop_reason import StopReason


def test_run_pauses_at_until_and_next_run_resumes(tmp_path: Path) -> None:
    settings = make_settings(12, checkpoint_policy="none")
    fit(make_spec(tmp_path / "whole"), LineTrial, settings)

    spec = make_spec(tmp_path / "parts")
    stop_reason, trial = fit(spec, LineTrial, replace(settings, until=Batch(5)))
    assert stop_reason is StopReason.REACHED
    assert stop_reason.exit_code == EXIT_REACHED
    assert len(trial.seen) == 5
    assert sorted(metrics(tmp_path / "parts", "validation")) == [5]
    checkpoint = last_checkpoint(tmp_path / "parts")
    assert checkpoint is not None
    assert checkpoint.steps_completed == 5

    next_spec = msgspec.structs.replace(spec, latest_checkpoint=checkpoint, run_id=spec.run_id + 1)
    stop_reason, trial = fit(next_spec, LineTrial, settings)
    assert stop_reason is StopReason.FINISHED
    assert len(trial.seen) == 7
    expected = metrics(tmp_path / "whole", "training")
    assert metrics(tmp_path / "parts", "training") == expected


def test_until_at_max_length_finishes(tmp_path: Path) -> None:
    settings = make_settings(4, until=Batch(4))
    assert fit(make_spec(tmp_path), LineTrial, settings)[0] is StopReason.FINISHED


def test_validates_at_searcher_rungs() -> None:
    fit_spec = FitSpec(
        max_length=LengthSpec("epochs", 9), until=3, validate_at=(1, 3, 9), metric="loss",
        validation_period=LengthSpec("batches", 50),
    )  # fmt: skip
    settings = FitSettings.from_spec(fit_spec)
    assert settings.until == Epoch(3)
    schedule = settings.schedule(epoch_length=20)
    assert [step for step in range(1, 200) if schedule.validate.due(step)] == [
        20,
        50,
        60,
        100,
        150,
        180,
    ]
    assert (schedule.end, schedule.pauses, schedule.max_steps) == (60, True, 180)
    assert not schedule.finished(59)
    assert schedule.validation_due(60)
    assert schedule.checkpoint_due(60)
    assert schedule.next_stop(55) == 60


@pytest.mark.parametrize(
    ("unit", "until", "at_limit"),
    [("batches", 5, True), ("batches", 6, False), ("epochs", 2, True)],
)
def test_core_script_at_its_limit_records_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str, until: int, at_limit: bool
) -> None:
    length = LengthSpec(unit, 9)  # type: ignore[arg-type]
    fit_spec = FitSpec(max_length=length, until=until, metric="loss")
    spec = msgspec.structs.replace(make_spec(tmp_path), fit=fit_spec, master="")
    write_run_spec(spec, tmp_path / "run.json")
    monkeypatch.setenv("ZEROLAB_RUN_SPEC", str(tmp_path / "run.json"))
    with zerolab.core.init() as context:
        assert context.train.until == until
        context.train.report_validation_metrics(5, {"loss": 1.0, "epochs": 2.0})
    reason = read_reason(Path(spec.run_dir))
    assert (reason is not None and reason.exit_code == EXIT_REACHED) == at_limit
