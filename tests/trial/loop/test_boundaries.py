"""Schedule of reports, validations and checkpoints; Determined's DeepSpeed controller fails it."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerotrial
from tests.trial.helpers import LineTrial, fit, make_settings, make_spec, metrics
from zerolab.config import load_experiment
from zerolab.config.experiment.run_spec import run_spec_fields
from zerolab.contract.spec import FitSpec, LengthSpec
from zerolab.errors import ConfigError
from zerotrial import Batch, Epoch
from zerotrial.loop.settings import FitSettings
from zerotrial.loop.units import Period, Schedule

TABLE = [
    # epoch, max_length, validation period, reporting period, trained, validations
    (20, Batch(50), None, Batch(100), 50, [50]),
    (20, Batch(60), Batch(30), Batch(100), 60, [30, 60]),
    (20, Epoch(4), Epoch(2), Batch(100), 80, [40, 80]),
    (20, Epoch(3), Epoch(1), Batch(5), 60, [20, 40, 60]),
    (40, Batch(40), Batch(10), Batch(5), 40, [10, 20, 30, 40]),
    (20, Batch(50), Batch(10), Batch(100), 50, [10, 20, 30, 40, 50]),
    (20, Batch(50), Batch([7, 33]), Batch(100), 50, [7, 33, 50]),
    (20, Batch(90), Epoch(2), Batch(7), 90, [40, 80, 90]),
]


class EpochRecorder(zerotrial.Callback):
    def __init__(self) -> None:
        self.epochs: list[tuple[str, int]] = []

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self.epochs.append(("start", epoch_idx))

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.epochs.append(("end", epoch_idx))


class RecordedTrial(LineTrial):
    def __init__(self, context: zerotrial.ZeroTrialContext) -> None:
        super().__init__(context)
        self.recorder = EpochRecorder()
        self.positions: list[tuple[int, int, bool, bool]] = []

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        context = self.context
        assert context.current_train_batch() == batch_idx
        assert context.current_train_epoch() == epoch_idx
        position = (epoch_idx, batch_idx, context.is_epoch_start(), context.is_epoch_end())
        self.positions.append(position)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    def build_callbacks(self):
        return {"watch": self.recorder}


@pytest.mark.parametrize(("epoch", "length", "validate", "report", "trained", "points"), TABLE)
def test_lengths_and_periods(
    tmp_path: Path, epoch, length, validate, report, trained, points
) -> None:
    settings = make_settings(
        max_length=length,
        validation_period=validate,
        report_period=report,
        checkpoint_policy="none",
    )
    spec = make_spec(tmp_path, {"samples": 2 * epoch})
    _, trial = fit(spec, RecordedTrial, settings)
    assert len(trial.seen) == trained
    assert sorted(metrics(tmp_path, "validation")) == points
    every = report.value
    assert sorted(metrics(tmp_path, "training")) == sorted(
        {*range(every, trained + 1, every), trained}
    )
    assert trial.positions == [
        (batch // epoch, batch, batch % epoch == 0, batch % epoch == epoch - 1)
        for batch in range(trained)
    ]
    expected = []
    for index in range(-(-trained // epoch)):
        expected.append(("start", index))
        if (index + 1) * epoch <= trained:
            expected.append(("end", index))
    assert trial.recorder.epochs == expected


@given(
    st.integers(1, 300),
    st.integers(1, 50),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_stops_include_every_due_batch(
    length: int, epoch: int, report: int, validate: int, checkpoint: int
) -> None:
    schedule = Schedule(length, epoch, Period(report), Period(validate), Period(checkpoint))
    steps, stops = 0, []
    while not schedule.finished(steps):
        steps = schedule.next_stop(steps)
        stops.append(steps)
    assert stops[-1] == length
    for period in (epoch, report, validate, checkpoint):
        assert set(range(period, length + 1, period)) <= set(stops)
    steps_range = range(1, length + 1)
    for due, period in (
        (schedule.report_due, report),
        (schedule.validation_due, validate),
        (schedule.checkpoint_due, checkpoint),
    ):
        assert [n for n in steps_range if due(n)] == sorted(
            {*range(period, length + 1, period), length}
        )


def test_initial_validation_comes_before_the_first_batch(tmp_path: Path) -> None:
    fit(make_spec(tmp_path), settings=make_settings(3, initial_validation=True))
    assert sorted(metrics(tmp_path, "validation")) == [0, 3]


def test_test_mode_runs_one_batch(tmp_path: Path) -> None:
    class Trial(LineTrial):
        evaluated = 0

        def evaluate_batch(self, dataloader_iter):
            self.evaluated += 1
            return super().evaluate_batch(dataloader_iter)

    settings = make_settings(50, test_mode=True, report_period=Batch(100))
    _, trial = fit(make_spec(tmp_path), Trial, settings)
    assert (len(trial.seen), trial.evaluated) == (1, 1)
    assert sorted(metrics(tmp_path, "training")) == sorted(metrics(tmp_path, "validation")) == [1]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_settings_from_experiment_configuration() -> None:
    config = {
        "entrypoint": "m:T",
        "searcher": {
            "name": "single", "max_length": {"epochs": 3}, "metric": "error",
            "smaller_is_better": False,
        },
        "min_validation_period": {"batches": 0},
        "min_checkpoint_period": {"epochs": 1},
        "scheduling_unit": 7,
        "checkpoint_policy": "all",
        "profiling": {"enabled": True, "begin_on_batch": 2, "end_after_batch": 3},
    }  # fmt: skip
    settings = FitSettings.from_spec(run_spec_fields(load_experiment(config))["fit"])
    assert (settings.metric, settings.smaller_is_better) == ("error", False)
    assert settings.checkpoint_policy == "all"
    schedule = settings.schedule(10)
    assert schedule.max_steps == 30
    assert [n for n in range(1, 31) if schedule.checkpoint_due(n)] == [10, 20, 30]
    assert [n for n in range(1, 31) if schedule.validation_due(n)] == [30]
    assert [n for n in range(1, 31) if schedule.report_due(n)] == [1, 2, 5, 7, 14, 21, 28, 30]
    assert [n for n in range(6) if settings.profiling.covers(n)] == [2, 3]


@pytest.mark.parametrize(
    ("period", "expected"),
    [
        (100, [1, 2, 5, 10, 20, 50, 100, 184]),
        (1, list(range(1, 185))),
        (3, [1, 2, *range(3, 184, 3), 184]),
        (1000, [1, 2, 5, 10, 20, 50, 100, 184]),
    ],
)
def test_first_batches_are_reported_at_increasing_intervals(
    period: int, expected: list[int]
) -> None:
    fit_spec = FitSpec(max_length=LengthSpec("batches", 184), scheduling_unit=period)
    schedule = FitSettings.from_spec(fit_spec).schedule(None)
    assert [n for n in range(1, 185) if schedule.report_due(n)] == expected
    stops, at = [], 0
    while at < 184:
        at = schedule.next_stop(at)
        stops.append(at)
    assert set(expected) <= set(stops)
    exact = FitSettings.from_spec(fit_spec, report_period=Batch(50)).schedule(None)
    assert [n for n in range(1, 185) if exact.report_due(n)] == [50, 100, 150, 184]


@pytest.mark.parametrize("early", [True, False])
def test_slow_first_batches_are_reported_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """Averages of the scheduled reports do not depend on timing."""
    monkeypatch.setattr("zerotrial.loop.recorder._MAX_REPORT_INTERVAL_S", 0.0)
    monkeypatch.setattr("zerotrial.loop.controller._AGREEMENT_INTERVAL_S", 0.0)
    every = make_settings(12, report_period=Batch(8))
    fit(make_spec(tmp_path / "plain"), LineTrial, every)
    fit(make_spec(tmp_path / "early"), LineTrial, replace(every, early_reports=early))
    plain, early_metrics = (
        metrics(tmp_path / "plain", "training"),
        metrics(tmp_path / "early", "training"),
    )
    assert sorted(plain) == [8, 12]
    assert sorted(early_metrics) == (list(range(1, 13)) if early else [8, 12])
    assert early_metrics[12] == plain[12]


def test_invalid_lengths_are_named() -> None:
    with pytest.raises(ConfigError, match=r"searcher\.max_length: is missing"):
        FitSettings.from_spec(FitSpec(max_length=None, metric="loss"))
    with pytest.raises(ConfigError, match="Batch: must hold whole numbers >= 1, got 0"):
        Batch(0)
    with pytest.raises(ConfigError, match=r"has no length.*records_per_epoch"):
        make_settings(max_length=Epoch(2)).schedule(None)
