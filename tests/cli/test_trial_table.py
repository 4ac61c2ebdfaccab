"""``zerolab trial list`` and ``experiment describe`` of a search."""

import csv
import io
import json
import os
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.installation import in_process
from tests.long_names import CALLED
from tests.server.helpers import validation
from tests.server.processes import LiveServer, played
from zerolab.cli.trial_table import print_trials
from zerolab.contract.flatten import safe_cell, short_names

pytestmark = pytest.mark.processes

HPARAMS = {
    "deepspeed_config": "ds_config.json",
    "optimizer": {"lr": {"type": "categorical", "vals": [0.3, 0.001, 0.02]}},
    "word": {"type": "categorical", "vals": ["=1+1", "plain"]},
    "fixed": 7,
}
SEARCHER = {"name": "grid", "metric": "loss", "max_length": 20, "max_concurrent_trials": 6}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A finished search of six trials; the loss of each is its learning rate."""
    with played(tmp_path_factory.mktemp("search")) as (server, owner):
        owner.submit(searcher=SEARCHER, hyperparameters=HPARAMS)
        owner.add_agent(slots=6)
        for item in owner.wait_for_runs(6):
            owner.post(f"/runs/{item.run_id}/started", {})
            loss = item.spec.hparams["optimizer"]["lr"]
            owner.report(item.run_id, validation(20, loss))
            owner.exit(item.run_id, 0)
        yield server


def zerolab(server: LiveServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"ZEROLAB_MASTER": server.url, "ZEROLAB_TOKEN": server.token}
    return in_process(environment, *arguments, expect=None)


def test_table_has_differing_hyperparameters(live: LiveServer) -> None:
    shown = zerolab(live, "trial", "list", "1", "--sort", "metric").stdout
    head, *_ = (line.split() for line in shown.splitlines() if line.strip())
    assert head[-2:] == ["optimizer.lr", "word"]
    assert "fixed" not in shown
    rows = [line.split() for line in shown.splitlines() if "COMPLETED" in line]
    assert [row[-2] for row in rows] == ["0.001", "0.001", "0.02", "0.02", "0.3", "0.3"]
    assert max(map(len, shown.splitlines())) <= 100


def test_long_names_are_shortened() -> None:
    assert short_names(CALLED) == CALLED


def long_names(trial_id: int) -> dict[str, Any]:
    return {
        "id": trial_id, "state": "COMPLETED", "result_problem": None, "steps_completed": 20,
        "best_validation": 0.25, "latest_validation": 0.5, "restarts": 0, "slot_seconds": 3.0,
        "hparams": dict.fromkeys(CALLED, trial_id / 7),
    }  # fmt: skip


def test_narrow_terminal_omits_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = [long_names(trial_id) for trial_id in (1, 2)]
    print_trials(trials)  # output to a file has all columns
    out, err = capsys.readouterr()
    head, _, *rows = (line.split() for line in out.splitlines() if line.strip())
    assert head[8:] == list(CALLED.values())  # "slot time" are two
    assert rows[0][-1] == "0.1429"
    assert "weight_decay is overwrite_deepspeed_args.optimizer.params.weight_decay" in err
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for name, value in {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "85"}.items():
        monkeypatch.setenv(name, value)
    print_trials(trials)
    out, err = capsys.readouterr()
    lines = [line for line in re.sub(r"\x1b\[[\d;]*m", "", out).splitlines() if line.strip()]
    assert max(map(len, lines)) <= 85
    assert len(lines) == 4  # no wrapped lines
    assert lines[0].split()[8:] == ["lr", "weight_decay"]
    left_out = "overwrite_deepspeed_args.optimizer.params.lr, overwrite_deepspeed_args.scheduler"
    assert f"the terminal is too narrow for {left_out}" in err
    print_trials([row | {"hparams": {"slot time": row["id"]}} for row in trials])
    out, err = capsys.readouterr()
    assert "hparams.slot time" in out
    assert not err


def test_trials_sorted_by_hyperparameter(live: LiveServer) -> None:
    options = ["--sort=-optimizer.lr", "--limit=2", "--json"]
    shown = zerolab(live, "trial", "list", "1", *options).stdout
    assert [trial["hparams"]["optimizer"]["lr"] for trial in json.loads(shown)] == [0.3, 0.3]


def test_csv_has_all_hyperparameters(live: LiveServer) -> None:
    shown = zerolab(live, "trial", "list", "1", "--csv").stdout
    rows = list(csv.DictReader(io.StringIO(shown)))
    assert len(rows) == 6
    assert {row["hparams.word"] for row in rows} == {"'=1+1", "plain"}
    assert {row["hparams.fixed"] for row in rows} == {"7"}
    assert {float(row["best_validation"]) for row in rows} == {0.3, 0.001, 0.02}
    assert all(float(row["slot_seconds"]) >= 0 for row in rows)


def test_csv_escapes_formulas() -> None:
    assert [safe_cell(text) for text in ("=1", "+1", "-1", "@a", "a=1")] == [
        "'=1", "'+1", "'-1", "'@a", "a=1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lr", "did you mean 'optimizer.lr'?"),
        ("wrd", "did you mean 'word'?"),
        ("-lss", "did you mean 'metric' (loss, best first)?"),
        ("best_valdation", "did you mean 'best_validation'?"),
        ("last.validation.lss", "did you mean 'last.validation.loss'?"),
        ("qqq", "there are: metric, id, state, "),
    ],
)
def test_unknown_sort_column_has_suggestion(live: LiveServer, name: str, meant: str) -> None:
    done = zerolab(live, "trial", "list", "1", f"--sort={name}")
    assert done.returncode == 2
    assert f"got {name.removeprefix('-')!r}; {meant}" in done.stderr


def test_trials_sorted_by_metric_column(live: LiveServer) -> None:
    shown = zerolab(live, "trial", "list", "1", "--sort=max.validation.loss", "--json").stdout
    losses = [trial["best_validation"] for trial in json.loads(shown)]
    assert losses == sorted(losses)


def test_csv_and_json_exclude_each_other(live: LiveServer) -> None:
    both = zerolab(live, "trial", "list", "1", "--csv", "--json")
    assert (both.returncode, both.stdout) == (2, "")


def test_describe_shows_best_trial_and_cost(live: LiveServer) -> None:
    shown = zerolab(live, "experiment", "describe", "1").stdout
    assert "optimizer.lr: 0.001" in shown
    assert "slot time" in shown
