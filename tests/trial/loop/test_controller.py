"""Training loop: callbacks, user errors, checkpoint policies and stop requests."""

import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrdict import AttrDict
from torch import nn

import zerotrial
from tests.trial.helpers import (
    Line,
    LineTrial,
    PlainEngine,
    build,
    fit,
    last_checkpoint,
    make_settings,
    make_spec,
    metrics,
    records,
)
from zerolab.contract.messages import Directive
from zerolab.errors import StaleRunError, TrialError
from zerotrial import Batch, StopReason
from zerotrial.data.devices import to_device
from zerotrial.extensions.pipeline import PipelineModule


class CallRecorder(zerotrial.Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            object.__getattribute__(self, "calls").append(name)
        return object.__getattribute__(self, name)


class RecordedTrial(LineTrial):
    def build_callbacks(self):
        self.recorder = CallRecorder()
        return {"diary": self.recorder}


def test_callbacks_run_in_order(tmp_path: Path) -> None:
    settings = make_settings(2, report_period=Batch(2), initial_validation=True)
    _, trial = fit(make_spec(tmp_path, {"samples": 4}), RecordedTrial, settings)
    validation = ["on_validation_start", "on_validation_epoch_start"]
    validation += ["on_validation_epoch_end", "on_validation_end"]
    checkpoint = ["on_checkpoint_save_start", "on_checkpoint_write_end", "on_checkpoint_upload_end"]
    assert trial.recorder.calls == [
        "on_trial_startup",
        "on_training_start",
        *validation,
        "on_training_epoch_start",
        "on_training_epoch_end",
        "on_training_workload_end",
        *validation,
        *checkpoint,
        "on_trial_shutdown",
    ]
    _, trial = fit(
        make_spec(tmp_path, latest=last_checkpoint(tmp_path)), RecordedTrial, make_settings(2)
    )
    assert trial.recorder.calls == [
        "on_trial_startup",
        "on_checkpoint_load_start",
        "on_training_start",
        "on_trial_shutdown",
    ]


def test_callbacks_get_metrics_and_files(tmp_path: Path) -> None:
    class Recorder(zerotrial.Callback):
        def __init__(self):
            self.values = {}

        def on_training_workload_end(self, avg_metrics, batch_metrics):
            self.values["training"] = (avg_metrics, batch_metrics)

        def on_validation_epoch_end(self, outputs):
            self.values["outputs"] = outputs

        def on_validation_end(self, metrics):
            self.values["validation"] = metrics

        def on_checkpoint_write_end(self, checkpoint_dir):
            self.values["files"] = sorted(p.name for p in Path(checkpoint_dir).iterdir())

        def on_checkpoint_upload_end(self, uuid):
            self.values["uuid"] = uuid

    class Trial(LineTrial):
        def build_callbacks(self):
            self.recorder = Recorder()
            return {"notes": self.recorder}

    _, trial = fit(make_spec(tmp_path), Trial, make_settings(3, report_period=Batch(3)))
    values = trial.recorder.values
    averages, batches = values["training"]
    assert len(batches) == 3
    assert averages["loss"] == pytest.approx(sum(b["loss"] for b in batches) / 3)
    assert len(values["outputs"]) == 3
    assert values["validation"].keys() == {"validation_loss"}
    assert values["files"] == ["model0.pt", "trial", "user"]
    assert values["uuid"] == last_checkpoint(tmp_path).uuid


def test_unknown_callback_methods_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Older(zerotrial.Callback):
        def on_checkpoint_end(self, checkpoint_dir): ...

        def on_validation_ends(self, metrics): ...

        def own_callbacks(self): ...

    class Trial(LineTrial):
        def build_callbacks(self):
            return {"older": Older()}

    fit(make_spec(tmp_path), Trial, make_settings(1))
    assert [line for line in caplog.messages if "is never called" in line] == [
        "callback 'older': on_checkpoint_end is never called; define on_checkpoint_write_end",
        "callback 'older': on_validation_ends is never called by the loop; "
        "did you mean 'on_validation_end'?",
    ]


def test_shutdown_callback_runs_after_error(tmp_path: Path) -> None:
    recorders = []

    class Trial(RecordedTrial):
        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            recorders.append(self.recorder)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fit(make_spec(tmp_path), Trial)
    assert recorders[0].calls[-1] == "on_trial_shutdown"


@pytest.mark.parametrize("trained", [0, 2])
def test_wrong_number_of_micro_batches_raises(tmp_path: Path, trained: int) -> None:
    class Trial(LineTrial):
        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            for _ in range(trained):
                super().train_batch(dataloader_iter, epoch_idx, batch_idx)
            return torch.tensor(0.0)

    with pytest.raises(
        TrialError,
        match=rf"must train 3 micro-batch\(es\) a batch .*the first engine trained {3 * trained} "
        r"in 1 batch\(es\) instead of 3.*called 3 time\(s\) a batch.*disable_auto_grad_accumul",
    ):
        fit(make_spec(tmp_path, {"accumulation": 3}), Trial)


@pytest.mark.parametrize(("loops", "valid"), [(3, True), (2, False)])
def test_trial_can_loop_over_micro_batches(tmp_path: Path, loops, valid) -> None:
    class Trial(LineTrial):
        def __init__(self, context):
            super().__init__(context)
            context.disable_auto_grad_accumulation()
            self.calls = 0

        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            self.calls += 1
            for _ in range(loops):
                super().train_batch(dataloader_iter, epoch_idx, batch_idx)
            return torch.tensor(0.0)

    spec = make_spec(tmp_path, {"accumulation": 3, "samples": 12})
    if valid:
        _, trial = fit(spec, Trial, make_settings(4))
        assert (trial.calls, trial.engine.global_steps) == (4, 4)
    else:
        with pytest.raises(TrialError, match="called once a batch: loop over 3 micro-batches"):
            fit(spec, Trial)


class UnmanagedTrial(LineTrial):
    """Trial whose every ``engine.step()`` is an optimizer step."""

    def __init__(self, context):
        self.context, self.samples = context, 12
        engine, *_ = zerotrial.initialize(
            model=torch.nn.Linear(1, 1),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 3,
                "managed_gradient_accumulation": False,
                "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
            },
        )
        self.engine = context.wrap_model_engine(engine)
        if context.get_hparam("once"):
            context.disable_auto_grad_accumulation()

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        for _ in range(3):
            x, y, _ = next(dataloader_iter)
            loss = (self.engine(x) - y).square().mean()
            self.engine.backward(loss)
        self.engine.step()
        return loss


def test_unmanaged_accumulation_is_called_once_per_batch(tmp_path: Path) -> None:
    _, trial = fit(make_spec(tmp_path, {"once": True}), UnmanagedTrial, make_settings(4))
    assert (trial.engine.global_steps, trial.engine.micro_steps) == (4, 12)
    with pytest.raises(TrialError, match=r"managed_gradient_accumulation: must be true where"):
        fit(make_spec(tmp_path, {"once": False}), UnmanagedTrial, make_settings(4))


class PipelineEngine(PlainEngine):
    """Pipeline of one stage: one call trains a full batch."""

    class Grid:
        def get_pipe_parallel_rank(self):
            return 0

        def get_pipe_parallel_world_size(self):
            return 1

        def get_data_parallel_rank(self):
            return 0

        def get_data_parallel_world_size(self):
            return 1

    grid = Grid()

    def train_batch(self, batches):
        for _ in range(self.accumulation):
            x, y, _ = next(batches)
            loss = (self(x) - y).square().mean()
            self.backward(loss)
            self.step()
        return loss

    def eval_batch(self, batches):
        drawn = [next(batches) for _ in range(self.accumulation)]
        return torch.stack([(self(x) - y).square().mean() for x, y, _ in drawn]).mean()


class PipelineTrial(zerotrial.ZeroTrial):
    validation_samples = 10

    def __init__(self, context):
        self.context = context
        self.engine = context.wrap_model_engine(PipelineEngine(torch.nn.Linear(1, 1), 2, 2))
        self.calls = {"train": 0, "evaluate": 0}

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        self.calls["train"] += 1
        return self.engine.train_batch(dataloader_iter)

    def evaluate_batch(self, dataloader_iter):
        self.calls["evaluate"] += 1
        return {"validation_loss": self.engine.eval_batch(dataloader_iter)}

    def build_training_data_loader(self):
        return zerotrial.DataLoader(Line(20), batch_size=2)

    def build_validation_data_loader(self):
        return zerotrial.DataLoader(Line(self.validation_samples), batch_size=2)


def test_pipeline_takes_full_batches(tmp_path: Path, caplog) -> None:
    _, trial = fit(make_spec(tmp_path), PipelineTrial, make_settings(5))
    assert trial.calls == {"train": 5, "evaluate": 2}
    assert "1 validation micro-batches do not fill a batch" in caplog.text

    class TooFewTrial(PipelineTrial):
        validation_samples = 2

    with pytest.raises(TrialError, match="2 micro-batches at a time, and there are only 1"):
        fit(make_spec(tmp_path), TooFewTrial, make_settings(5))


class WithoutIterators(zerotrial.ZeroTrial):
    """Trial whose engine reads the trial's loaders."""

    def __init__(self, context):
        hparams = context.get_hparams()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "scheduler": {"type": "ReduceLROnPlateau", "params": {"patience": 0, "factor": 0.5}},
        }
        model: Any = Loss()
        if hparams["pipeline"]:
            model = PipelineModule([nn.Linear(1, 1)], 1, loss_fn=nn.functional.mse_loss)
        self.engine = context.wrap_model_engine(zerotrial.initialize(model=model, config=config)[0])
        if not hparams["pipeline"]:
            context.disable_auto_grad_accumulation()
        self.losses: list[float] = []
        self.rates: list[float] = []

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        self.rates += self.engine.get_lr()
        return self.engine.train_batch()

    def evaluate_batch(self, dataloader_iter):
        self.losses.append(float(self.engine.eval_batch()))
        return {"validation_loss": 1.0}

    def build_training_data_loader(self):
        return zerotrial.DataLoader(Pairs(), batch_size=2)

    def build_validation_data_loader(self):
        return zerotrial.DataLoader(Pairs(), batch_size=2)


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layer(x), y)


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index / 8]), torch.tensor([index / 4])


@pytest.mark.parametrize("pipeline", [False, True])
def test_engine_reads_the_trials_loaders(tmp_path: Path, pipeline: bool) -> None:
    settings = make_settings(6, validation_period=zerotrial.Batch(2))
    _, trial = fit(make_spec(tmp_path, {"pipeline": pipeline}), WithoutIterators, settings)
    assert len(trial.rates) == 6
    initial, _, final = torch.tensor(trial.losses).view(3, -1).mean(1).tolist()
    assert final < initial
    # ReduceLROnPlateau follows validations, whose metric does not improve.
    assert trial.rates == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05]


@pytest.mark.parametrize(
    ("policy", "losses", "saved"),
    [
        ("best", [3.0, 4.0, 2.0, float("nan"), 2.0], [1, 3, 5]),
        ("all", [3.0, 4.0, 2.0, 1.0, 2.0], [1, 2, 3, 4, 5]),
        ("none", [3.0, 2.0, 1.0, 1.0, 1.0], [5]),
    ],
)
def test_checkpoint_policy(tmp_path: Path, policy, losses, saved) -> None:
    class Trial(LineTrial):
        def evaluate_batch(self, dataloader_iter):
            next(dataloader_iter)
            return {"validation_loss": losses[self.context.current_train_batch()]}

    settings = make_settings(5, validation_period=Batch(1), checkpoint_policy=policy)
    fit(make_spec(tmp_path), Trial, settings)
    assert [r["steps_completed"] for r in records(tmp_path, "checkpoint")] == saved


def test_stop_request_saves_checkpoint(tmp_path: Path) -> None:
    class Trial(LineTrial):
        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            self.context.set_stop_requested(True)
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    stop_reason, trial = fit(make_spec(tmp_path), Trial, make_settings(50))
    assert (stop_reason, stop_reason.exit_code) == (StopReason.STOP_REQUESTED, 0)
    assert last_checkpoint(tmp_path).steps_completed == len(trial.seen) == 1


def test_preempted_trial_saves_checkpoint(
    tmp_path: Path,
) -> None:
    controller, session = build(make_spec(tmp_path), settings=make_settings(100_000))
    poller = session._poller
    trial = controller._trial
    train_batch = trial.train_batch

    def preempt_at_batch_10(*arguments):
        if arguments[2] == 10:
            poller.directive = Directive("preempt", version=1, deadline_s=60.0)
        return train_batch(*arguments)

    trial.train_batch = preempt_at_batch_10
    stop_reason = controller.run()
    session.close(stop_reason)
    assert (stop_reason, stop_reason.exit_code) == (StopReason.PREEMPTED, 66)
    assert last_checkpoint(tmp_path).steps_completed == len(trial.seen) < 100_000


def test_superseded_run_saves_no_checkpoint(tmp_path: Path) -> None:
    controller, session = build(make_spec(tmp_path), settings=make_settings(100_000))
    session._reporter.stale.set()
    stop_reason = controller.run()
    session.close(stop_reason)
    assert (stop_reason, stop_reason.exit_code) == (StopReason.STALE, 67)
    assert last_checkpoint(tmp_path) is None

    controller, session = build(make_spec(tmp_path))
    controller._next_agreement = 1_000  # superseded between the last agreement and the checkpoint
    validate = controller._validator.run

    def superseded_after_validation():
        metrics = validate()
        session._reporter.stale.set()
        return metrics

    controller._validator.run = superseded_after_validation
    with pytest.raises(StaleRunError, match="this checkpoint is dropped"):
        controller.run()
    session.close(None)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_two_engines_are_checkpointed(tmp_path: Path, caplog) -> None:
    class Trial(LineTrial):
        def __init__(self, context):
            super().__init__(context)
            self.other = context.wrap_model_engine(PlainEngine(torch.nn.Linear(1, 1), micro=3))

    fit(make_spec(tmp_path), Trial, make_settings(1))
    assert "micro-batch sizes of the engines differ (2, then 3)" in caplog.text
    saved = records(tmp_path, "checkpoint")[0]["resources"]
    assert {"model0.pt", "model1.pt"} <= set(saved)


def test_wrap_model_engine_rejects_other_objects(tmp_path: Path) -> None:
    controller, session = build(make_spec(tmp_path))
    context = controller._context
    session.close(None)
    with pytest.raises(TrialError, match=r"got the tuple that zerotrial\.initialize"):
        context.wrap_model_engine((context.models[0], None, None, None))
    with pytest.raises(TrialError, match="wrapped already"):
        context.wrap_model_engine(context.models[0])

    class NoEngineTrial(LineTrial):
        def __init__(self, context):
            self.context = context

    with pytest.raises(TrialError, match=r"NoEngineTrial\.__init__: must wrap an engine"):
        fit(make_spec(tmp_path), NoEngineTrial)


def test_set_mpu_only_once_after_an_engine(tmp_path: Path) -> None:
    unit = zerotrial.ModelParallelUnit(1, 2, should_report_metrics=False)

    class EarlyMpuTrial(LineTrial):
        def __init__(self, context):
            context.set_mpu(unit)

    with pytest.raises(TrialError, match="set_mpu: wrap an engine first"):
        fit(make_spec(tmp_path), EarlyMpuTrial)

    class Trial(LineTrial):
        def __init__(self, context):
            super().__init__(context)
            context.set_mpu(unit)
            with pytest.raises(TrialError, match="set already"):
                context.set_mpu(unit)

    _, trial = fit(
        make_spec(tmp_path), Trial, make_settings(6, max_length=zerotrial.Epoch(1), metric=None)
    )
    # Replica 1 of 2: every second micro-batch of 22 samples in batches of 2 x 2.
    assert len(trial.seen) == 6
    assert trial.context.get_global_batch_size() == 4
    assert "loss" not in metrics(tmp_path, "training")[6]


def test_context_getters(tmp_path: Path) -> None:
    hparams = {"accumulation": 2, "micro": 3, "nested": {"lr": 0.1}}
    config = {"searcher": {"metric": "x"}, "data": {"path": "here"}}
    controller, session = build(make_spec(tmp_path, hparams, config=config))
    context = controller._context
    session.close(None)
    assert context.get_train_micro_batch_size_per_gpu() == 3
    assert context.get_num_micro_batches_per_slot() == 2
    assert context.get_per_slot_batch_size() == context.get_global_batch_size() == 6
    assert AttrDict(context.get_hparams()).nested.lr == 0.1
    assert context.get_hparam("micro") == 3
    assert context.get_data_config() == {"path": "here"}
    assert context.get_experiment_config() == config
    assert (context.get_experiment_id(), context.get_trial_id()) == (1, 1)
    assert (context.get_trial_seed(), context.get_initial_batch()) == (7, 0)
    assert context.distributed.allgather(5) == [5]
    assert (context.distributed.rank, context.distributed.size) == (0, 1)
    with pytest.raises(TrialError, match="unknown hyperparameter 'depth'; there are: accum"):
        context.get_hparam("depth")
    with pytest.raises(TrialError, match="training has not begun"):
        context.is_epoch_start()
    fresh = zerotrial.ZeroTrialContext(context.spec, context.distributed)
    with pytest.raises(TrialError, match="no engine is wrapped yet"):
        fresh.get_train_micro_batch_size_per_gpu()


def test_to_device_moves_nested_data(caplog) -> None:
    @dataclass
    class Pair:
        left: torch.Tensor
        right: list

    Point = namedtuple("Point", ["x", "y"])
    lock = threading.Lock()
    data = {
        "array": np.ones(2, dtype=np.float32),
        "deep": [(torch.zeros(1), "text", 3), Point(np.int64(4), None)],
        "pair": Pair(torch.ones(1), [np.zeros(1)]),
        "ordered": OrderedDict(a=torch.ones(1)),
        "lock": lock,
        "locks": [lock, lock],
    }
    moved = to_device(data, torch.device("meta"))
    assert moved["array"].device.type == "meta"
    assert moved["deep"][0][0].is_meta
    assert moved["deep"][0][1:] == ("text", 3)
    assert isinstance(moved["deep"][1], Point)
    assert moved["deep"][1].x.is_meta
    assert moved["pair"].left.is_meta
    assert moved["pair"].right[0].is_meta
    assert isinstance(moved["ordered"], OrderedDict)
    assert moved["lock"] is lock
    assert len([r for r in caplog.records if "cannot move" in r.message]) == 1


def test_loader_without_length_uses_records_per_epoch(tmp_path: Path) -> None:
    class Trial(LineTrial):
        def __init__(self, context):
            super().__init__(context)
            context.disable_dataset_reproducibility_checks()

        def build_training_data_loader(self):
            class Endless:
                def __iter__(self):
                    while True:
                        yield torch.ones(2, 1), torch.ones(2, 1), torch.zeros(2)

            return Endless()

    _, trial = fit(make_spec(tmp_path), Trial, make_settings(5))
    assert len(trial.seen) == 5
    settings = make_settings(max_length=zerotrial.Epoch(2), records_per_epoch=6)
    _, trial = fit(make_spec(tmp_path), Trial, settings)
    assert len(trial.seen) == 6
    with pytest.raises(TrialError, match="no length, so there are no epochs"):
        fit(make_spec(tmp_path), Trial, make_settings(5))[1].context.is_epoch_end()


@pytest.mark.parametrize(("draws", "warned"), [(1, 0), (2, 1)])
def test_drawing_too_many_batches_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, draws: int, warned: int
) -> None:
    class Trial(LineTrial):
        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            for _ in range(draws - 1):
                next(dataloader_iter)
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    fit(make_spec(tmp_path), Trial, make_settings(6))
    messages = [r.getMessage() for r in caplog.records if "micro-batches" in r.getMessage()]
    assert len(messages) == warned
    assert all(
        "call next(dataloader_iter) once for each engine.step()" in line for line in messages
    )
