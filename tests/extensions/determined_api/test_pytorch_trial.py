"""PyTorchTrial against plain torch, and scripts of Determined as experiments."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import zerolab
import zerotrial
from tests.end_to_end.installation import Installation
from zerotrial.extensions.determined_api import DIRECTORY

BATCH = 4
INPUTS = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS.sum(1, keepdim=True)


@pytest.fixture
def det(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the package ``determined`` for one test."""
    monkeypatch.syspath_prepend(str(DIRECTORY))
    yield importlib.import_module("determined")
    for name in [name for name in sys.modules if name.partition(".")[0] == "determined"]:
        del sys.modules[name]


def build_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def make_trial(det: Any, context: Any, mode: str = "STEP_EVERY_BATCH") -> Any:
    pytorch = det.pytorch

    class Line(pytorch.PyTorchTrial):  # type: ignore[misc, name-defined]
        def __init__(self, context: Any, rate: float) -> None:
            self.context = context
            self.model = context.wrap_model(build_model())
            self.optimizer = context.wrap_optimizer(
                torch.optim.Adam(self.model.parameters(), lr=rate)
            )
            schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)
            context.wrap_lr_scheduler(schedule, getattr(pytorch.LRScheduler.StepMode, mode))
            self.calls: list[tuple[int, int]] = []

        def build_training_data_loader(self) -> Any:
            data = torch.utils.data.TensorDataset(INPUTS, TARGETS)
            return pytorch.DataLoader(data, batch_size=BATCH)

        build_validation_data_loader = build_training_data_loader

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.calls.append((epoch_idx, batch_idx))
            x, y = batch
            loss = torch.nn.functional.mse_loss(self.model(x), y)
            self.context.backward(loss)
            self.context.step_optimizer(
                self.optimizer, lambda params: torch.nn.utils.clip_grad_norm_(params, 0.5)
            )
            return {"loss": loss}

        def evaluate_batch(self, batch: Any, batch_idx: int) -> Any:
            assert not self.model.training
            x, y = batch
            return {"loss": torch.nn.functional.mse_loss(self.model(x), y), "index": batch_idx}

    return Line(context, 0.05)


def plain_weights(
    batches: int, every: int, mode: str, losses: list[float] | None = None
) -> list[torch.Tensor]:
    """Train the same model with plain torch."""
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    per_epoch = len(INPUTS) // BATCH
    for batch in range(batches):
        rows = slice(batch % per_epoch * BATCH, (batch % per_epoch + 1) * BATCH)
        loss = torch.nn.functional.mse_loss(model(INPUTS[rows]), TARGETS[rows])
        if losses is not None:
            losses.append(loss.item())
        (loss / every).backward()
        updates = (batch + 1) % every == 0
        if updates:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        due = {
            "STEP_EVERY_BATCH": True,
            "STEP_EVERY_OPTIMIZER_STEP": updates,
            "STEP_EVERY_EPOCH": (batch + 1) % per_epoch == 0,
            "MANUAL_STEP": False,
        }
        if due[mode]:
            schedule.step()
    return list(model.parameters())


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    "mode", ["STEP_EVERY_BATCH", "STEP_EVERY_OPTIMIZER_STEP", "STEP_EVERY_EPOCH", "MANUAL_STEP"]
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_training_equals_plain_torch(
    det: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, every: int
) -> None:
    monkeypatch.chdir(tmp_path)
    with det.pytorch.init(aggregation_frequency=every) as context:
        trial = make_trial(det, context, mode)
        result = det.pytorch.Trainer(trial, context).fit(max_length=det.pytorch.Batch(24))
    assert trial.calls[:2] == [(0, 0), (0, 1)]
    assert trial.calls[-1] == (2, 23)
    for ours, theirs in zip(trial.model.parameters(), plain_weights(24, every, mode), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert result.steps_completed == 24


def test_resumed_training_is_equal(
    det: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pytorch = det.pytorch
    with pytorch.init() as context:
        trial = make_trial(det, context)
        first = pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(13))
    with pytorch.init() as context:
        trial = make_trial(det, context)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(24), latest_checkpoint=first.checkpoints[-1].path
        )
    assert trial.calls[0] == (1, 13)
    weights = plain_weights(24, 1, "STEP_EVERY_BATCH")
    for ours, theirs in zip(trial.model.parameters(), weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_trial_on_zero_engine(
    det: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "train_batch_size": 2 * BATCH,
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
    }
    pytorch = det.pytorch

    class Line(pytorch.PyTorchTrial):  # type: ignore[misc, name-defined]
        def __init__(self, context: Any) -> None:
            self.context = context
            self.model = context.wrap_model(build_model())
            self.optimizer = context.wrap_optimizer(
                torch.optim.Adam(self.model.parameters(), lr=0.05)
            )
            schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)
            mode = pytorch.LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP
            context.wrap_lr_scheduler(schedule, mode)
            self.losses: list[float] = []

        def build_training_data_loader(self) -> Any:
            data = torch.utils.data.TensorDataset(INPUTS, TARGETS)
            return pytorch.DataLoader(data, batch_size=BATCH)

        build_validation_data_loader = build_training_data_loader

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
            self.losses.append(loss.item())
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

        def evaluate_batch(self, batch: Any) -> Any:
            return {"loss": torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])}

    with pytorch.init(hparams={"deepspeed_config": config}) as context:
        trial = Line(context)
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(10))
        with pytest.raises(zerotrial.trial.TrialError, match="use gradient_clipping"):
            context.step_optimizer(trial.optimizer, lambda _: None)
    losses: list[float] = []
    plain_weights(20, 2, "STEP_EVERY_OPTIMIZER_STEP", losses)
    assert trial.losses == pytest.approx(losses, rel=1e-5)


def test_missing_names_say_what_to_use(det: Any) -> None:
    with pytest.raises(ImportError, match=r"determined\.keras is not supported.*Keras"):
        _ = det.keras
    with pytest.raises(ImportError, match="Zerolab"):
        _ = det.pytorch.load_trial_from_checkpoint_path


def test_ranks_of_another_launcher_are_refused(det: Any) -> None:
    ranks = det.core.DistributedContext(rank=1, size=2)
    with pytest.raises(zerolab.errors.ConfigError, match="got rank 1 of 2; let Zerolab start"):
        det.core.init(distributed=ranks)


def test_mixed_precision(det: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with det.pytorch.init() as context:
        trial = make_trial(det, context)
        context.experimental.use_amp()
        types = set()
        trial.model.register_forward_hook(lambda _, __, output: types.add(output.dtype))
        det.pytorch.Trainer(trial, context).fit(max_length=det.pytorch.Batch(2))
    assert types == {torch.bfloat16}
    assert trial.model[0].weight.dtype == torch.float32


def test_trial_without_model_is_refused(det: Any) -> None:
    class Empty(det.pytorch.PyTorchTrial):  # type: ignore[misc, name-defined]
        def __init__(self, context: Any) -> None:
            self.context = context

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any: ...
        def build_training_data_loader(self) -> Any: ...
        def build_validation_data_loader(self) -> Any: ...

    with (
        det.pytorch.init() as context,
        pytest.raises(zerotrial.trial.TrialError, match="must wrap a model with context"),
    ):
        Empty(context)


SCRIPT = """
import torch
import determined as det
from determined import pytorch
from determined.pytorch import PyTorchTrial


class Line(PyTorchTrial):
    def __init__(self, context, hparams):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(3, 1))
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(self.model.parameters(), lr=hparams["lr"]))

    def build_training_data_loader(self):
        x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        return pytorch.DataLoader(data, batch_size=self.context.get_per_slot_batch_size())

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"loss": torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])}


info = det.get_cluster_info()
assert info.trial.experiment_id == 1
with pytorch.init() as context:
    trial = Line(context, info.trial.hparams)
    print("ranks:", context.distributed.get_size(), type(trial.model).__name__)
    pytorch.Trainer(trial, context).fit(
        max_length=pytorch.Epoch(4), latest_checkpoint=info.latest_checkpoint)
"""


@pytest.mark.processes
def test_script_runs_unchanged_on_two_ranks(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    config = {
        "name": "line",
        "entrypoint": "python3 -m determined.launch.torch_distributed python3 train.py",
        "environment": {"determined": "zerolab"},
        "hyperparameters": {"lr": 0.1, "global_batch_size": 16},
        "resources": {"slots_per_trial": 2},
        "searcher": {"name": "single", "metric": "loss"},
    }
    (code / "const.yaml").write_text(yaml.safe_dump(config))
    with Installation.running(tmp_path / "home", slots=2) as installation:
        done = installation.cli("run", code / "const.yaml")
        assert done.returncode == 0, done.stderr
        experiment = installation.client.experiment(1)
        assert experiment.best_validation < 1.0
        assert any("ranks: 2 _Parallel" in line for line in installation.lines(1))
