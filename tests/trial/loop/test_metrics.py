"""Metrics: conversion, averages, reducers, system metrics and profiling."""

import logging
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import zerotrial
from tests.trial.helpers import (
    Line,
    LineTrial,
    PlainEngine,
    fit,
    make_settings,
    make_spec,
    metrics,
    records,
)
from zerolab.contract.spec import ProfilingSpec
from zerolab.core.machine_metrics import MachineMetrics
from zerolab.errors import TrialError
from zerolab.extensions.system_metrics import SystemMetrics, _gpu_sample, _open_gpus
from zerolab.ranks import OneRank
from zerotrial import Batch, Reducer
from zerotrial.failures import reason_of
from zerotrial.loop.metrics import UnreportedMetrics, average_by_batch, to_numbers
from zerotrial.reducers import reduce_values


def test_tensor_is_the_loss_averaged_by_batch() -> None:
    unreported = UnreportedMetrics()
    weight = torch.tensor(2.0, requires_grad=True)
    for batch, value in ((1, 1.0), (1, 3.0), (2, 6.0)):
        unreported.add(batch, weight * value)
    assert unreported.entries() == [(1, {"loss": 4.0}), (2, {"loss": 12.0})]
    unreported.clear()
    assert unreported.entries() == []


def test_train_batch_must_return_a_loss() -> None:
    with pytest.raises(TrialError, match=r"must return the loss as a tensor.*got NoneType"):
        UnreportedMetrics().add(1, None)


def test_averages_are_weighted_by_batches() -> None:
    rank_0 = [(1, {"loss": 0.0}), (2, {"loss": 0.0}), (3, {"loss": 0.0})]
    rank_1 = [(1, {"loss": 1.0, "only_here": 5.0})]
    averages, batches = average_by_batch(rank_0 + rank_1)
    assert averages == {"loss": 0.25, "only_here": 5.0}
    assert batches == [{"loss": 0.5, "only_here": 5.0}, {"loss": 0.0}, {"loss": 0.0}]


def test_to_numbers_warns_once_per_ignored_metric(caplog) -> None:
    values = {
        "int": 1,
        "bool": True,
        "numpy": np.float32(0.5),
        "array": np.array([2]),
        "tensor": torch.tensor([[3.0]]),
        "nan": math.nan,
        "inf": -math.inf,
        "none": None,
        "words": "text",
        "vector": torch.zeros(2),
    }
    numbers = to_numbers(values)
    to_numbers(values)
    assert math.isnan(numbers.pop("nan"))
    assert numbers == {
        "int": 1,
        "bool": 1,
        "numpy": 0.5,
        "array": 2,
        "tensor": 3,
        "inf": -math.inf,
    }
    assert sorted(r.args[0] for r in caplog.records) == ["vector", "words"]


@pytest.mark.parametrize(
    ("reducer", "expected"),
    [(Reducer.AVG, 2.0), (Reducer.SUM, 6.0), (Reducer.MIN, 1.0), (Reducer.MAX, 3.0)],
)
def test_reducers_keep_nan_and_infinities(reducer: Reducer, expected: float) -> None:
    assert reduce_values([3.0, 1.0, 2.0], reducer) == expected
    assert math.isnan(reduce_values([1.0, math.nan, 2.0], reducer))
    reduced = reduce_values([1.0, math.inf], reducer)
    assert reduced == (1.0 if reducer is Reducer.MIN else math.inf)


def test_nan_metrics_are_reported(tmp_path: Path) -> None:
    class Trial(LineTrial):
        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            super().train_batch(dataloader_iter, epoch_idx, batch_idx)
            return torch.tensor(math.nan if batch_idx == 1 else math.inf)

        def evaluate_batch(self, dataloader_iter):
            next(dataloader_iter)
            return {"validation_loss": math.nan}

    fit(make_spec(tmp_path), Trial, make_settings(3, validation_period=Batch(1)))
    assert [r["loss"] for _, r in sorted(metrics(tmp_path, "training").items())] == [
        "Infinity",
        "NaN",
        "Infinity",
    ]
    assert {r["validation_loss"] for r in metrics(tmp_path, "validation").values()} == {"NaN"}
    # NaN is never the best: the only checkpoint is the one at the end.
    assert [r["steps_completed"] for r in records(tmp_path, "checkpoint")] == [3]


def test_missing_searcher_metric_fails_first_validation(tmp_path: Path) -> None:
    settings = make_settings(4, metric="accuracy", validation_period=zerotrial.Batch(2))
    with pytest.raises(TrialError, match="got 'accuracy'; there are: validation_loss"):
        fit(make_spec(tmp_path), settings=settings)
    assert list(metrics(tmp_path, "validation")) == [2]


def test_missing_searcher_metric_warns_later(tmp_path: Path, caplog) -> None:
    class Trial(LineTrial):
        def evaluate_batch(self, dataloader_iter):
            output = super().evaluate_batch(dataloader_iter)
            return output if self.engine.global_steps < 4 else {"other": 1.0}

    fit(make_spec(tmp_path), Trial, make_settings(4, validation_period=zerotrial.Batch(2)))
    assert "got 'validation_loss'; there are: other" in caplog.text
    assert list(metrics(tmp_path, "validation")) == [2, 4]


def test_evaluation_reducer_per_metric(tmp_path: Path) -> None:
    class Trial(LineTrial):
        def evaluate_batch(self, dataloader_iter, batch_idx):
            next(dataloader_iter)
            value = float(batch_idx + 1)
            return {"a": value, "b": value, "c": value, "d": value, "last": value}

        def evaluation_reducer(self):
            return {
                "a": Reducer.AVG,
                "b": Reducer.SUM,
                "c": Reducer.MAX,
                "d": Reducer.MIN,
                "last": lambda values: values[-1] * 10,
            }

    fit(make_spec(tmp_path), Trial, make_settings(1, metric=None))
    reported = metrics(tmp_path, "validation")[1]
    assert [reported[name] for name in ("a", "b", "c", "d", "last")] == [2, 6, 3, 1, 30]
    assert (reported["batches"], reported["epochs"]) == (1, 1 / 11)

    class Wrong(Trial):
        def evaluation_reducer(self):
            return {"a": Reducer.AVG}

    with pytest.raises(
        TrialError, match=r"one for each of \['a', 'b', 'c', 'd', 'last'\], got \['a'\]"
    ):
        fit(make_spec(tmp_path / "wrong"), Wrong, make_settings(1))


def test_evaluate_full_dataset(tmp_path: Path) -> None:
    class Trial(LineTrial):
        evaluate_batch = zerotrial.ZeroTrial.evaluate_batch

        def evaluate_full_dataset(self, data_loader):
            return {"samples": sum(len(x) for x, _, _ in data_loader)}

    fit(make_spec(tmp_path), Trial, make_settings(1, metric=None))
    assert metrics(tmp_path, "validation")[1]["samples"] == 6


def draws_and_gives_a_number(batches):
    next(batches)
    return 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (draws_and_gives_a_number, "must return a dict of metric names to values, got int"),
        (lambda batches: {}, r"must take its batch with next\(dataloader_iter\)"),
        (lambda batches: [next(batches) for _ in range(4)], "requested more batches than exist"),
    ],
)
def test_evaluate_batch_errors(tmp_path: Path, body, message) -> None:
    class Trial(LineTrial):
        def evaluate_batch(self, dataloader_iter):
            return body(dataloader_iter)

    with pytest.raises(TrialError, match=f"evaluate_batch: .*{message}"):
        fit(make_spec(tmp_path), Trial, make_settings(1))


def test_batch_parameter_error_names_the_iterator(
    tmp_path: Path,
) -> None:
    class Trains(LineTrial):
        def train_batch(self, batch, epoch_idx, batch_idx):
            x, y = batch
            return x - y

    class Evaluates(LineTrial):
        def evaluate_batch(self, batch, batch_idx):
            return {"validation_loss": len(batch[0])}

    for trial, message in (
        (Trains, "train_batch: .*ValueError: too many"),
        (Evaluates, "evaluate_b"),
    ):
        with pytest.raises(TrialError, match=message) as caught:
            fit(make_spec(tmp_path), trial, make_settings(1))
        assert "its first argument is an iterator, not a batch; take one" in str(caught.value)

    class FailsLater(LineTrial):
        def train_batch(self, batch, epoch_idx, batch_idx):
            if batch_idx == 1:
                raise ValueError("of the data")
            return super().train_batch(batch, epoch_idx, batch_idx)

    # The parameter is called batch, but the trial expects an iterator.
    with pytest.raises(ValueError, match=r"^of the data$"):
        fit(make_spec(tmp_path), FailsLater, make_settings(2))


def test_reducers_get_values_of_all_batches(tmp_path: Path) -> None:
    class Spread(zerotrial.MetricReducer):
        def reset(self):
            self.values = []

        def per_slot_reduce(self):
            return (min(self.values), max(self.values))

        def cross_slot_reduce(self, per_slot_metrics):
            low, high = zip(*per_slot_metrics, strict=True)
            return {"spread": max(high) - min(low), "ranks": len(low)}

    class Trial(LineTrial):
        def __init__(self, context):
            super().__init__(context)
            self.middle = context.wrap_reducer(lambda v: sorted(v)[len(v) // 2], name="middle")
            self.spread = context.wrap_reducer(Spread(), for_validation=False)

        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            self.middle.update(batch_idx)
            self.spread.values.append(batch_idx)
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

        def evaluate_batch(self, dataloader_iter, batch_idx):
            self.middle.update(10 + batch_idx)
            return super().evaluate_batch(dataloader_iter)

    fit(make_spec(tmp_path), Trial, make_settings(6, report_period=Batch(3)))
    training = metrics(tmp_path, "training")
    assert [training[n]["middle"] for n in (3, 6)] == [1, 4]
    assert [training[n]["spread"] for n in (3, 6)] == [2, 2]
    validation = metrics(tmp_path, "validation")[6]
    assert validation["middle"] == 11
    assert "spread" not in validation

    # A validation in between keeps the values for the next training report.
    settings = make_settings(6, report_period=Batch(6), validation_period=Batch(2))
    fit(make_spec(tmp_path / "between"), Trial, settings)
    assert metrics(tmp_path / "between", "training")[6]["middle"] == 3


@pytest.mark.parametrize(
    ("failing_call", "call"),
    [
        ("reset of reducer 'f1'", 1),  # at wrap_reducer
        ("reset of reducer 'f1'", 2),  # before the first training period
        ("per_slot_reduce of reducer 'f1'", 1),
        ("cross_slot_reduce of reducer 'f1'", 1),
        ("evaluation_reducer of metric 'validation_loss'", 1),
    ],
)
def test_failing_reducer_is_named(tmp_path: Path, failing_call: str, call: int) -> None:
    calls: list[str] = []

    def enter(method: str) -> float:
        calls.append(method)
        return 1 / 0 if failing_call.startswith(method) and calls.count(method) == call else 1.0

    class FailingReducer(zerotrial.MetricReducer):
        def reset(self):
            enter("reset")

        def per_slot_reduce(self):
            return enter("per_slot_reduce")

        def cross_slot_reduce(self, per_slot_metrics):
            return enter("cross_slot_reduce")

    class Trial(LineTrial):
        def __init__(self, context):
            super().__init__(context)
            context.wrap_reducer(FailingReducer(), name="f1")

        def evaluation_reducer(self):
            return lambda values: enter("evaluation_reducer")

    with pytest.raises(ZeroDivisionError) as caught:
        fit(make_spec(tmp_path), Trial, make_settings(1))
    reason = reason_of(caught.value, Path(__file__).parent)
    assert reason.startswith("test_metrics.py:")
    assert reason.endswith(f"; raised by {failing_call}")


def test_reducer_errors(tmp_path: Path) -> None:
    def reduce_to(result, name):
        class Trial(LineTrial):
            def __init__(self, context):
                super().__init__(context)
                self.reducer = context.wrap_reducer(lambda values: result, name=name)

        return Trial

    with pytest.raises(TrialError, match="reducer 'x': has a name and must give one value"):
        fit(make_spec(tmp_path / "1"), reduce_to({}, "x"), make_settings(1))
    unnamed = "reducer '<lambda>': has no name and must give a dict of metrics, got int"
    with pytest.raises(TrialError, match=unnamed):
        fit(make_spec(tmp_path / "2"), reduce_to(1, None), make_settings(1))

    class Twice(LineTrial):
        def __init__(self, context):
            super().__init__(context)
            context.wrap_reducer(context.wrap_reducer(sum, name="x"), name="y")

    with pytest.raises(TrialError, match="wrapped already"):
        fit(make_spec(tmp_path / "3"), Twice, make_settings(1))

    class Wrong(LineTrial):
        def evaluation_reducer(self):
            return {"validation_loss": 3}

    named = "evaluation_reducer: of metric 'validation_loss': must give a zerotrial.Reducer or"
    with pytest.raises(TrialError, match=named):
        fit(make_spec(tmp_path / "4"), Wrong, make_settings(1))


def test_engine_metrics_and_speed_are_reported(tmp_path: Path) -> None:
    class Trial(LineTrial):
        def __init__(self, context):
            super().__init__(context)
            self.engine.loss_scale = 1024.0
            self.engine.skipped_steps = 2
            context.wrap_model_engine(PlainEngine(torch.nn.Linear(1, 1)))

    fit(make_spec(tmp_path), Trial, make_settings(4, report_period=Batch(2)))
    reported = metrics(tmp_path, "training")[4]
    assert reported["learning_rate"] == reported["learning_rate_1"] == 0.01
    assert (reported["grad_norm"], reported["loss_scale"], reported["skipped_steps"]) == (
        4,
        1024,
        2,
    )
    (speed,) = [
        record["values"]
        for record in records(tmp_path, "metrics")
        if (record["group"], record["steps"]) == ("system", 4)
        and "batches_per_second" in record["values"]
    ]
    assert speed["samples_per_second"] == pytest.approx(2 * speed["batches_per_second"])
    assert records(tmp_path, "progress")[-1]["value"] == 1.0


def test_system_metrics_of_machine() -> None:
    system = SystemMetrics(sample_s=0.01)  # the first means do not wait for ten seconds
    try:
        sample = None
        while sample is None:
            sample = system.take()
    finally:
        system.close()
    assert set(sample) >= {
        "cpu_percent",
        "memory_used_bytes",
        "disk_used_percent",
        "network_sent_bytes_per_second",
    }
    assert sample["memory_used_bytes"] > 0


class FakeRank(OneRank):
    """Position of a rank; without communication."""

    def __init__(self, rank: int, size: int, local_rank: int, local_size: int) -> None:
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = local_rank, local_size


def test_machines_are_numbered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    positions = [(0, 4, 0, 1), (1, 4, 0, 2), (2, 4, 1, 2), (3, 4, 0, 1)]
    ranks = [MachineMetrics(FakeRank(*position)) for position in positions]
    try:
        assert ranks[2].take(now=True) is None  # the first rank of its machine measures it
        with caplog.at_level(logging.INFO):
            named = ranks[3].named([{"cpu_percent": 1.0}, {"cpu_percent": 2.0}, None, {}])
            assert named == {"machine0/cpu_percent": 1.0, "machine1/cpu_percent": 2.0}
            later = ranks[3].named([{}, {}, None, {"cpu_percent": 3.0}])
            assert later == {"machine2/cpu_percent": 3.0}
        assert caplog.text.count("is machine2 among the system metrics") == 1
    finally:
        for machines in ranks:
            machines.close()
    single = MachineMetrics(FakeRank(0, 2, 0, 2))
    single.close()
    assert single.named([{"cpu_percent": 1.0}, None]) == {"cpu_percent": 1.0}


class Gpus:
    """Fake of NVIDIA's library: two GPUs, one without a power sensor."""

    class NVMLError(Exception): ...

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(used=10 + gpu, total=80)

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=50 + gpu)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        if gpu == 1:
            raise self.NVMLError
        return 300_000


def test_system_metrics_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Gpus())
    assert _gpu_sample(_open_gpus()) == {
        "gpu0_memory_used_bytes": 10,
        "gpu0_percent": 50,
        "gpu0_power_watts": 300,
        "gpu1_memory_used_bytes": 11,
        "gpu1_percent": 51,
    }


def test_profiling_times_configured_batches(tmp_path: Path) -> None:
    profiling = ProfilingSpec(enabled=True, begin_on_batch=2, end_after_batch=3)
    settings = make_settings(6, profiling=profiling)
    fit(make_spec(tmp_path), settings=settings)
    timed = [v for v in metrics(tmp_path, "system").values() if "profile_batch_seconds" in v]
    assert timed
    for values in timed:
        parts = values["profile_data_seconds"] + values["profile_compute_seconds"]
        assert values["profile_batch_seconds"] == pytest.approx(parts)


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "lone \udc80 surrogate"])
def test_bad_metric_name_of_trial_class_keeps_the_others(tmp_path: Path, name: str) -> None:
    """Covers metrics of batches, validations and callbacks, in reports and in TensorBoard."""

    class Renaming(zerotrial.Callback):
        def on_training_workload_end(self, avg_metrics, batch_metrics):
            avg_metrics |= {name + "\t": 2.0, "of_callback": 2.0}

    class Trial(LineTrial):
        def __init__(self, context):
            super().__init__(context)
            context.get_tensorboard_writer()

        def build_callbacks(self):
            return {"renaming": Renaming()}

        def train_batch(self, iterator, epoch_idx, batch_idx):
            return {"loss": super().train_batch(iterator, epoch_idx, batch_idx)["loss"], name: 1.0}

        def evaluate_batch(self, iterator):
            return {**super().evaluate_batch(iterator), name: 1.0}

    fit(make_spec(tmp_path), Trial, make_settings(3))
    for group, present in (("training", "of_callback"), ("validation", "validation_loss")):
        reported = metrics(tmp_path, group).values()
        assert reported
        assert all(present in values and name not in values for values in reported)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("training/of_callback")) == 3
    assert f"training/{name}" not in events.Tags()["scalars"]


def test_traces_and_tensorboard_files_in_run_directory(tmp_path: Path) -> None:
    class Trial(LineTrial):
        def __init__(self, context):
            super().__init__(context)
            context.set_profiler(
                activities=[torch.profiler.ProfilerActivity.CPU],
                schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
            )
            context.get_tensorboard_writer().add_text("note", "hello")

    fit(make_spec(tmp_path), Trial, make_settings(3))
    assert list((tmp_path / "traces").glob("rank_0*.json*"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("training/loss")] == [1, 2, 3]
    assert [event.step for event in events.Scalars("validation/validation_loss")] == [3]


def test_step_time_shares_are_reported(tmp_path: Path) -> None:
    class Slow(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
            time.sleep(0.1)
            return Line(16)[index]

    class Trial(LineTrial):
        def __init__(self, context):
            self.context = context
            self.seen = []
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "AdamW"},
                "steps_per_print": 2,
                "wall_clock_breakdown": True,
            }
            engine, *_ = zerotrial.initialize(model=torch.nn.Linear(1, 1), config=config)
            self.engine = context.wrap_model_engine(engine)

        def build_training_data_loader(self):
            return zerotrial.DataLoader(Slow(), batch_size=2)

    fit(make_spec(tmp_path), Trial, make_settings(4, report_period=Batch(2)))
    reported = metrics(tmp_path, "training")[4]
    shares = {name: value for name, value in reported.items() if name.endswith("_share")}
    always = {"input_share", "forward_share", "backward_share", "communication_share", "step_share"}
    assert always <= shares.keys()
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares.values()) >= 0
    assert shares["input_share"] * reported["step_seconds"] > 0.19  # two reads of 0.1 s each
    assert reported["momentum"] == pytest.approx(0.9)
