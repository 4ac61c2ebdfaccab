"""Result of ``Trainer.fit``: history, best checkpoint, representations, and progress output."""

import copy
import io
import json
import math
import os
import pickle
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import zerotrial
from tests.trial.helpers import LineTrial, last_checkpoint, metrics
from zerolab.contract.spec import ENV_RUN_SPEC
from zerolab.errors import ConfigError
from zerotrial import StopReason, Trainer
from zerotrial.loop.console import PROGRESS, Console
from zerotrial.loop.fit_result import FitResult, History, SavedCheckpoint


@pytest.fixture(autouse=True)
def _standalone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (ENV_RUN_SPEC, "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def fit(**options) -> FitResult:
    with zerotrial.init(hparams={"samples": 20}, seed=3) as context:
        return Trainer(LineTrial(context), context).fit(**options)


def make_result(values: dict[int, float], name: str = "accuracy", **options) -> FitResult:
    """Return a result with a checkpoint at each key of ``values``."""
    history = History()
    for steps, value in values.items():
        history.add("validation", steps, {name: value})
    saved = [SavedCheckpoint(f"{n:08d}-x", f"/c/{n}", n, {name: values[n]}) for n in values]
    return FitResult(
        StopReason.FINISHED,
        steps_completed=max(values, default=0),
        max_steps=max(values, default=0),
        history=history,
        checkpoints=saved,
        run_dir=Path("zerolab_run"),
        **options,
    )


def test_result_has_what_was_reported(tmp_path: Path) -> None:
    result = fit(max_length=6, validation_period=2, reporting_period=1)
    run = tmp_path / "zerolab_run"
    reported = metrics(run, "training")
    assert result.history.training["loss"].steps == sorted(reported) == [1, 2, 3, 4, 5, 6]
    assert result.history.training["loss"].values == [reported[n]["loss"] for n in range(1, 7)]
    assert "learning_rate" in result.history.training
    validations = metrics(run, "validation")
    values = {n: found["validation_loss"] for n, found in validations.items()}
    assert dict(result.history.validation["validation_loss"]) == values
    assert result.metrics == {"validation_loss": values[6]}
    assert (result.steps_completed, result.run_dir) == (6, run)
    assert result.checkpoint.uuid == last_checkpoint(run).uuid
    best = result.best_checkpoint
    assert best.metrics["validation_loss"] == min(values.values())
    assert best.path == str(run / "checkpoints" / best.uuid)


def test_result_survives_pickle_and_copy() -> None:
    result = make_result({1: 0.5, 2: 0.25}, metric="accuracy", smaller_is_better=False)
    for same in (pickle.loads(pickle.dumps(result)), copy.copy(result)):
        assert same.best_checkpoint == result.best_checkpoint
        assert repr(same) == repr(result)


def test_result_is_number_of_stop_reason() -> None:
    """Scripts that compared the former result, or passed it to ``sys.exit``, still work."""
    result = fit(max_length={"batches": 1})
    assert result == StopReason.FINISHED == int(result) == 0
    assert json.dumps(result) == "0"
    with pytest.raises(SystemExit) as exit_info:
        sys.exit(result)
    assert exit_info.value.code == 0


def test_resumed_fit_has_loaded_checkpoint() -> None:
    first = fit(max_length=2)
    unchanged = fit(max_length=2, latest_checkpoint="latest")
    assert [saved.uuid for saved in unchanged.checkpoints][:1] == [first.checkpoint.uuid]
    path = first.checkpoint.path
    second = fit(max_length=4, reporting_period=1, latest_checkpoint=path)
    assert [saved.steps_completed for saved in second.checkpoints] == [2, 4]
    assert min(second.history.training["loss"].steps) == 3


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("accuracy", {}, 3),  # no metric with "loss": the last one
        ("val_loss", {}, 1),
        ("accuracy", {"metric": "accuracy", "smaller_is_better": False}, 2),
        ("accuracy", {"metric": "missing"}, 3),
    ],
)
def test_best_checkpoint_by_metric(name: str, options: dict, steps: int) -> None:
    result = make_result({1: 0.5, 2: 0.9, 3: math.nan}, name, **options)
    assert result.best_checkpoint.steps_completed == steps


def test_best_by_named_metric() -> None:
    result = make_result({1: 0.5, 2: 0.9, 3: 0.9})
    assert result.best("accuracy", smaller_is_better=False).steps_completed == 2
    assert result.best("accuracy").steps_completed == 1
    with pytest.raises(ConfigError, match=r"metric: must be a validation metric \(accuracy\), got"):
        result.best("acuracy")
    assert make_result({}).best_checkpoint is None


def test_result_representations() -> None:
    result = make_result({1: 0.5, 2: 0.25}, "val_loss")
    assert repr(result) == str(result) == f"{result}"
    assert repr(result) == (
        "FitResult(finished after 2 batches; val_loss=0.25; "
        "best checkpoint 00000002 (batch 2, val_loss 0.25))"
    )
    table = make_result({1: 0.5}, "<b>loss</b>")._repr_html_()
    assert "<caption>finished after 1 batches</caption>" in table
    assert "&lt;b&gt;loss&lt;/b&gt;" in table
    assert "<b>" not in table
    assert repr(result.history) == "History(training: none; validation: val_loss)"
    assert repr(result.history.validation["val_loss"]) == "Series(2 points, 0.25 at batch 2)"


def test_history_to_pandas() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    history = History()
    history.add("training", 1, {"loss": 0.5})
    history.add("training", 2, {"loss": 0.25, "grad_norm": 2.0})
    frame = history.to_pandas()
    assert frame.index.name == "batch"
    assert frame["loss"].to_dict() == {1: 0.5, 2: 0.25}
    assert pandas.isna(frame["grad_norm"][1])
    assert history.to_pandas("validation").empty


def test_history_to_pandas_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="group: must be training or validation, got 'system'"):
        History().to_pandas("system")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pandas: must be installed; run `pip install pandas`"):
        History().to_pandas()


def test_level_silences_progress(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(PROGRESS, "level", 30)
    fit(max_length=1)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


SCRIPT = """
import sys, zerotrial
from tests.trial.helpers import LineTrial

with zerotrial.init(hparams={"samples": 20}) as context:
    trial = LineTrial(context)
    trainer = zerotrial.Trainer(trial, context)
    print("from the script", flush=True)
    result = trainer.fit(max_length=6, validation_period=2)
    print(result)
"""


@pytest.mark.slow
def test_terminal_shows_progress_bar(tmp_path: Path) -> None:
    """The bar is on the terminal, and redirected output of the script stays redirected."""
    (tmp_path / "train.py").write_text(SCRIPT)
    terminal, side = pty.openpty()
    with (tmp_path / "out.txt").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "TERM": "xterm",
                "COLUMNS": "120",
            },
            stdout=out,
            stderr=side,
        )
    os.close(side)
    shown = io.BytesIO()
    try:
        while chunk := os.read(terminal, 65536):
            shown.write(chunk)
    except OSError:  # the end of a terminal on Linux
        pass
    os.close(terminal)
    text = shown.getvalue().decode()
    assert process.wait() == 0, text
    assert "\u2501" in text
    assert "6/6" in text
    assert text.count("validation  validation_loss ") == 3
    assert "finished after 6 batches" in text
    script_lines = (tmp_path / "out.txt").read_text().splitlines()
    assert script_lines[0] == "from the script"
    assert script_lines[1].startswith("FitResult(finished after 6 batches; validation_loss=")
    assert len(script_lines) == 2


def test_console_shows_advance_between_reports(tmp_path: Path, caplog) -> None:
    now = [0.0]
    console = Console(tmp_path, 1000, lambda: now[0])
    with caplog.at_level("INFO", logger="zerotrial.progress"):
        console.advance(1, 10.0)  # no metrics yet
        console.training(2, {"loss": 1.0})
        now[0] = 11.0
        console.advance(50, 20.0)
        console.training(50, {"loss": 1.0})
    assert [record.getMessage() for record in caplog.records] == [
        "batch 2 of 1000  loss 1  10 samples/s",
        "batch 50 of 1000  loss 1  20 samples/s",
    ]
