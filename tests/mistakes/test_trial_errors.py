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
