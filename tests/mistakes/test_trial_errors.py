"""Messages for errors in trial classes and in scripts that use the trainer or the client."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import zerotrial
from tests.trial.helpers import LineTrial
from zerolab.client import Client
from zerolab.client.archive import pack
from zerolab.errors import ConfigError, TrialError
from zerotrial.failures import reason_of
from zerotrial.trial import check_trial_class

EMPTY = TensorDataset(torch.zeros(0, 1), torch.zeros(0))


def fit(tmp_path: Path, trial: type[LineTrial] = LineTrial, **arguments: Any) -> None:
    with zerotrial.init(hparams={"samples": 8}, run_dir=tmp_path / "run") as context:
        zerotrial.Trainer(trial(context), context).fit(**arguments)


@pytest.mark.parametrize("length", [3, {"batches": 3}, {"epochs": 1}, zerotrial.Batch(3)])
def test_fit_reads_lengths(tmp_path: Path, length: Any) -> None:
    fit(tmp_path, max_length=length, validation_period=2)
    assert list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("length", ["10", {"epoch": 3}, 0, {"batches": -1}, 2.5, True, {}])
def test_fit_refuses_length(tmp_path: Path, length: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        fit(tmp_path, max_length=length, checkpoint_period="often")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "checkpoint_period",
        "max_length",
    ]
    assert '{"epochs": n} or a number of batches' in str(caught.value)
    assert f"got {length!r}" in str(caught.value)


def loader(**arguments: Any) -> Any:
    return zerotrial.DataLoader(EMPTY, batch_size=2, **arguments)


@pytest.mark.parametrize("arguments", [{"shuffle": True}, {}, {"drop_last": True}])
def test_empty_training_loader(tmp_path: Path, arguments: dict[str, Any]) -> None:
    class Trial(LineTrial):
        def build_training_data_loader(self) -> Any:
            return loader(**arguments)

    with pytest.raises((ConfigError, ValueError), match=r"got 0; check .*path and") as caught:
        fit(tmp_path, Trial, max_length=3)
    assert "num_samples" not in str(caught.value)


@pytest.mark.parametrize("validation", [loader, list])
def test_empty_validation_loader_fails_before_training(tmp_path: Path, validation: Any) -> None:
    class Trial(LineTrial):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.disable_dataset_reproducibility_checks()

        def build_validation_data_loader(self) -> Any:
            return validation()

        def train_batch(self, *_: Any) -> Any:
            raise AssertionError

    with pytest.raises(TrialError, match="build_validation_data_loader: must give at least one"):
        fit(tmp_path, Trial, max_length=3)


METHODS = {name: getattr(LineTrial, name) for name in ("train_batch", "evaluate_batch")}


def declare(**methods: Any) -> type[zerotrial.ZeroTrial]:
    """Return a trial class with loaders, ``__init__`` and the methods given."""
    loaders = {
        "build_training_data_loader": LineTrial.build_training_data_loader,
        "build_validation_data_loader": LineTrial.build_validation_data_loader,
    }
    members = {"__init__": LineTrial.__init__, **loaders, **METHODS, **methods}
    defined = {name: method for name, method in members.items() if method is not None}
    return type("MyTrial", (zerotrial.ZeroTrial,), defined)


@pytest.mark.parametrize(
    ("methods", "problem"),
    [
        (
            {"evaluate_batch": None, "evalute_batch": METHODS["evaluate_batch"]},
            "MyTrial: must define evaluate_batch; rename 'evalute_batch' to 'evaluate_batch'",
        ),
        ({"evaluate_batch": None}, "MyTrial: must define evaluate_batch"),
        (
            {"train_batch": None, "training_batch": METHODS["train_batch"]},
            "MyTrial: must define train_batch; rename 'training_batch' to 'train_batch'",
        ),
        (
            {"build_validation_data_loader": None, "build_validation_dataloader": lambda self: 0},
            "rename 'build_validation_dataloader' to 'build_validation_data_loader'",
        ),
        (
            {"train_batch": lambda self, batch: 0},
            "MyTrial.train_batch: must be train_batch(self, dataloader_iter, epoch_idx, "
            "batch_idx), got train_batch(self, batch)",
        ),
        (
            {"evaluate_batch": lambda self: {}},
            "MyTrial.evaluate_batch: must be evaluate_batch(self, dataloader_iter), got",
        ),
        (
            {"build_training_data_loader": lambda: 0},
            "must be build_training_data_loader(self), got build_training_data_loader()",
        ),
        ({"__init__": lambda self: None}, "must be __init__(self, context), got __init__(self)"),
        ({"build_callbacks": lambda self, context: {}}, "must be build_callbacks(self), got"),
    ],
)
def test_trial_class_with_wrong_methods(methods: dict[str, Any], problem: str) -> None:
    with pytest.raises(TrialError) as caught:
        check_trial_class(declare(**methods))
    assert problem in str(caught.value)


def test_trial_class_problems_come_together() -> None:
    with pytest.raises(TrialError) as caught:
        check_trial_class(declare(evaluate_batch=None, train_batch=lambda self: 0))
    assert str(caught.value).count("must") == 2


@pytest.mark.parametrize(
    "methods",
    [
        {},
        {"train_batch": lambda self, *args: 0, "evaluate_batch": lambda self, **_: 0},
        {"train_batch": lambda self, dataloader_iter, epoch_idx, batch_idx, more=1: 0},
        {"train_batch": staticmethod(lambda dataloader_iter, epoch_idx, batch_idx: 0)},
        {"evaluate_batch": None, "evaluate_full_dataset": lambda self, data_loader: {}},
        {"evaluate_batch": lambda self, dataloader_iter, batch_idx: {}},
    ],
)
def test_trial_class_with_right_methods(
    methods: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    if "train_batch" in methods and "evaluate_batch" in methods:
        methods = {**methods, "evaluate_batch": lambda self, *args: {}}
    check_trial_class(declare(**methods))
    assert not caplog.records


def test_misspelled_optional_method_warns(caplog: pytest.LogCaptureFixture) -> None:
    check_trial_class(declare(build_callback=lambda self: {}))
    assert "MyTrial.build_callback is never called; did you mean 'build_callbacks'?" in caplog.text


def test_training_loader_without_return(tmp_path: Path) -> None:
    class Trial(LineTrial):
        def build_training_data_loader(self) -> Any:
            super().build_training_data_loader()

    with pytest.raises(TrialError) as caught:
        fit(tmp_path, Trial, max_length=3)
    expected = "build_training_data_loader: must return a DataLoader, got None; add return"
    assert str(caught.value) == expected


def test_validation_loader_without_return(tmp_path: Path) -> None:
    class Trial(LineTrial):
        evaluate_batch = zerotrial.ZeroTrial.evaluate_batch

        def build_validation_data_loader(self) -> Any:
            super().build_validation_data_loader()

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            return {"validation_loss": float(sum(1 for _ in data_loader))}

    with pytest.raises(TrialError, match="build_validation_data_loader: must return a DataLoader"):
        fit(tmp_path, Trial, max_length=3)


def test_error_of_unrelated_none_is_kept(tmp_path: Path) -> None:
    class Trial(LineTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            return next(None)  # type: ignore[call-overload]

    with pytest.raises(TypeError, match="not an iterator"):
        fit(tmp_path, Trial, max_length=3)


@pytest.mark.parametrize("callbacks", [None, [zerotrial.Callback()], {"mine": zerotrial.Callback}])
def test_wrong_callbacks(tmp_path: Path, callbacks: Any) -> None:
    class Trial(LineTrial):
        def build_callbacks(self) -> Any:
            return callbacks

    with pytest.raises(TrialError, match=r"build_callbacks: .*must .*Callback object"):
        fit(tmp_path, Trial, max_length=3)


def test_unknown_hyperparameter_suggests_name(tmp_path: Path) -> None:
    with (
        zerotrial.init(hparams={"width": 8}, run_dir=tmp_path) as context,
        pytest.raises(TrialError, match=r"'widht'; .*; did you mean 'width'"),
    ):
        context.get_hparam("widht")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), "context.to_device(batch)"),
        (ImportError("attempted relative import with no known parent package"), "by its name"),
        (ModuleNotFoundError("No module named 'timmm'"), "does not have it; install it there"),
        (ValueError("num_samples should be a positive integer value, but got num_samples=0"), ""),
    ],
)
def test_reason_of_trial_has_remedy(tmp_path: Path, error: Exception, remedy: str) -> None:
    reason = reason_of(error, tmp_path)
    assert reason.startswith(f"{type(error).__name__}: {error}; ")
    assert remedy in reason


def test_pack_accepts_text(tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text("x = 1\n")
    assert pack(str(tmp_path)) == pack(tmp_path)
    with pytest.raises(ConfigError, match="must be a directory that exists"):
        pack(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="must be a path, got 3"):
        pack(3)  # type: ignore[arg-type]


def test_client_finds_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROLAB_HOME", str(tmp_path))
    for name in ("ZEROLAB_MASTER", "ZEROLAB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="url: no server runs for the data directory"):
        Client()
    (tmp_path / "server.json").write_text('{"url": "http://127.0.0.1:7", "pid": 1}')
    (tmp_path / "token").write_text("local-token\n")
    with Client() as client:
        assert client.url == "http://127.0.0.1:7"
    monkeypatch.setenv("ZEROLAB_MASTER", "http://10.0.0.1:8")
    monkeypatch.setenv("ZEROLAB_TOKEN", "other")
    with Client() as client:
        assert client.url == "http://10.0.0.1:8"


def test_init_without_with_block(tmp_path: Path) -> None:
    context = zerotrial.init(run_dir=tmp_path / "run")
    with pytest.raises(AttributeError, match=r"get_hparam: use .*`with zerotrial.init\(\) as"):
        context.get_hparam("lr")  # type: ignore[attr-defined]
    assert not (tmp_path / "run").exists()


def test_result_of_initialize_used_as_engine(tmp_path: Path) -> None:
    config = {"train_batch_size": 8, "optimizer": {"type": "Adam"}}
    remedy = r"`engine, \*_ = zerotrial.initialize\(...\)`"
    with zerotrial.init(run_dir=tmp_path / "run") as context:
        engine = zerotrial.initialize(model=torch.nn.Linear(1, 1), config=config)
        with pytest.raises(TypeError, match=remedy):
            engine(torch.ones(8, 1))
        with pytest.raises(AttributeError, match=f"^backward: .*{remedy}"):
            engine.backward(torch.ones(()))
        with pytest.raises(TrialError, match=remedy):
            context.wrap_model_engine(engine)
        assert isinstance(engine, tuple)
        assert engine.engine is context.wrap_model_engine(engine[0])
