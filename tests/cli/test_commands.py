"""Commands against a real server and agent."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from tests.cli.model import MODEL, experiment
from tests.end_to_end.installation import Installation
from tests.waiting import DEADLINE_S, until
from zerolab.cli.main import main
from zerolab.cli.output import number, without_lengths
from zerolab.contract.messages import MetricsRecord
from zerolab.contract.spec import RunSpec
from zerolab.reports.metrics_file import MetricsFile

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation.running(tmp_path_factory.mktemp("installation") / "home") as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def finished(
    installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> subprocess.CompletedProcess[str]:
    """Return the output of ``zerolab run`` for experiment 1, the first one."""
    model = tmp_path_factory.mktemp("model")
    (model / "model_def.py").write_text(MODEL)
    (model / "experiment.yaml").write_text(yaml.safe_dump(experiment(20)))
    return installation.cli("run", model / "experiment.yaml")


def fields(text: str) -> dict[str, str]:
    return {
        name: value.strip()
        for name, _, value in (line.partition("  ") for line in text.splitlines())
    }


def test_run_shows_progress_and_result(
    installation: Installation, finished: subprocess.CompletedProcess[str]
) -> None:
    shown = fields(finished.stdout)
    assert shown["experiment"] == "1"
    assert shown["state"] == "COMPLETED"
    assert shown["best validation"].startswith("validation_loss ")
    assert shown["best validation"].endswith("at batch 20 of trial 1")
    uuid, _, own_metric = shown["checkpoint"].partition(" ")
    assert (installation.home.checkpoints / uuid).is_dir()
    assert own_metric.strip().startswith("validation_loss ")
    assert shown["browse"].startswith(installation.client.url)
    assert "submitted experiment 1 (line)" in finished.stderr
    with urllib.request.urlopen(shown["browse"]) as page:
        assert page.status == 200


def test_experiment_list_and_describe(
    installation: Installation,
) -> None:
    table = installation.quick("experiment", "list").stdout
    row = next(line for line in table.splitlines() if line.split()[:1] == ["1"])
    assert row.split()[1:3] == ["line", "COMPLETED"]
    listed = installation.json("experiment", "list", "--name", "lin", "--state", "COMPLETED")
    assert 1 in [item["id"] for item in listed]
    shown = fields(installation.cli("experiment", "describe", "1").stdout)
    resource = installation.json("experiment", "describe", "1")
    assert shown["experiment"] == "1: line"
    assert resource["best_trial_id"] == resource["trials"][0]["id"]
    assert shown["best validation"].startswith("validation_loss ")
    assert shown["best validation"].endswith(f"at batch 20 of trial {resource['best_trial_id']}")
    trial = installation.json("trial", "list", "1")[0]
    assert trial == resource["trials"][0]
    described = installation.json("trial", "describe", str(trial["id"]))
    runs = described.pop("runs")
    assert trial == described
    assert [(run["exit_code"], len(run["agents"])) for run in runs] == [(0, 1)]
    shown = fields(installation.quick("trial", "describe", "1").stdout)
    assert shown["batches"] == "20"
    assert shown["runs"].startswith(f"run {runs[0]['id']} on {runs[0]['agents'][0]}  from ")
    assert shown["runs"].endswith("  finished")
    assert "COMPLETED" in installation.quick("trial", "list", "1").stdout


def test_metrics_and_export(installation: Installation, tmp_path: Path) -> None:
    curves = installation.json("trial", "metrics", "1", "--name", "loss")
    assert [curve["name"] for curve in curves] == ["loss"]
    assert [step for step, _ in curves[0]["points"]] == [1, 2, 5, 10, 15, 20]
    assert "loss" in installation.quick("trial", "metrics", "1", "--group", "training").stdout
    shown = installation.quick("trial", "metrics", "1", "--group", "validation").stdout
    assert {line.split()[1] for line in shown.splitlines() if "validation " in line} == {
        "validation_loss"
    }
    assert " epochs " in installation.quick("trial", "metrics", "1", "--name", "epochs").stdout
    refused = installation.quick("trial", "metrics", "1", "--group", "train", expect=2).stderr
    assert "got 'train'; did you mean 'training'?" in refused
    wrong = ("--name", "los", "--name", "x", "--json")
    refused = installation.quick("trial", "metrics", "1", *wrong, expect=2)
    assert refused.stdout == ""
    assert "got 'los'; did you mean 'loss'?" in refused.stderr
    assert "got 'x'" in refused.stderr
    file = tmp_path / "metrics.csv"
    installation.quick("experiment", "metrics", "1", "--output", file)
    printed = installation.quick("experiment", "metrics", "1", "--output", "-").stdout
    assert file.read_text().splitlines() == printed.splitlines()
    assert sum(",loss," in line for line in printed.splitlines()) == 6


def test_checkpoint_list_and_download(installation: Installation, tmp_path: Path) -> None:
    resource = installation.json("checkpoint", "list", "1", "--trial", "1")
    uuid = resource[-1]["uuid"]
    table = installation.quick("checkpoint", "list", "1").stdout
    (best,) = (line.split() for line in table.splitlines() if " best " in line)
    assert (
        best[0]
        == installation.json("experiment", "describe", "1")["best_checkpoint"]["checkpoint"]["uuid"]
    )
    assert "validation_loss" in table
    assert best[3] == number(
        installation.json("checkpoint", "describe", best[0])["metrics"]["validation_loss"]
    )
    assert uuid in table
    described = installation.json("checkpoint", "describe", uuid)
    assert described["steps_completed"] == 20
    assert uuid in installation.quick("checkpoint", "describe", uuid[:8]).stdout
    target = tmp_path / "copy"
    assert installation.quick("checkpoint", "download", uuid, target).stdout.strip() == str(target)
    for name, size in described["resources"].items():
        assert (target / name).stat().st_size == size
    first = next(name for name, size in described["resources"].items() if size > 1)
    (target / first).unlink()
    (target / f"{first}.part").write_bytes(b"another content")  # like an interrupted download
    installation.quick("checkpoint", "download", uuid[:8], target)
    assert (target / first).stat().st_size == described["resources"][first]
    assert not (target / f"{first}.part").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").touch()
    shown = installation.quick("checkpoint", "download", uuid, other, expect=2).stderr
    assert "must be new or empty" in shown
    assert " kept, " in installation.quick("experiment", "describe", "1").stdout
    plan = installation.quick("checkpoint", "gc", "1", "--save-trial-latest", "0", "--dry-run")
    assert "would be deleted" in plan.stderr


def test_model_registry_keeps_checkpoint(installation: Installation, tmp_path: Path) -> None:
    uuid = installation.json("checkpoint", "list", "1")[-1]["uuid"]
    arguments = ("--description", "a line")
    assert installation.quick("model", "create", "lines", *arguments).stdout == "lines\n"
    assert "exists already" in installation.quick("model", "create", "lines", expect=2).stderr
    register = ("model", "register-version", "lines", uuid[:8], "--notes", "the first")
    assert [installation.quick(*register).stdout for _ in range(2)] == ["1\n", "1\n"]
    (listed,) = installation.json("model", "list")
    assert installation.json("model", "describe", "lines") == listed
    (version,) = listed["versions"]
    assert (version["checkpoint"], version["notes"]) == (uuid, "the first")
    assert version["metrics"] == installation.json("checkpoint", "describe", uuid)["metrics"]
    shown = installation.quick("model", "describe", "lines").stdout
    assert all(word in shown for word in ("a line", uuid, "the first"))
    assert version["metrics"]
    assert all(
        f"{name}: {number(value)}" in shown
        for name, value in without_lengths(version["metrics"]).items()
    )
    assert "lines" in installation.quick("model", "list").stdout
    alias = ("model", "alias", "lines", "production")
    for arguments in (alias, (*alias, "1", "--remove")):
        wrong = installation.quick(*arguments, expect=2).stderr
        assert "give either a version or --remove" in wrong
    assert "production is now version 1" in installation.quick(*alias, "1").stderr
    assert "production" in installation.quick("model", "describe", "lines").stdout
    copy = tmp_path / "copy"
    download = ("model", "download", "lines", copy, "--version")
    assert installation.quick(*download, "production").stdout == f"{copy}\n"
    assert (copy / "checkpoint.json").is_file()
    installation.quick(*alias, "--remove")
    unknown = installation.quick(*download, "production", expect=2).stderr
    assert "model lines has no version production; it has: 1" in unknown
    refused = installation.quick("checkpoint", "delete", uuid, "--yes", expect=2).stderr
    assert "is version 1 of model lines" in refused
    shown = installation.quick("model", "delete-version", "lines", "1").stderr
    assert "its checkpoint still exists" in shown
    again = installation.quick("model", "remove-version", "lines", "1", expect=2).stderr
    assert again.startswith("zerolab: there is no version 1 of model lines")
    installation.quick("model", "delete", "lines")
    assert installation.json("model", "list") == []
    assert installation.json("checkpoint", "describe", uuid)["state"] == "COMPLETED"


def test_logs_filter_and_follow(installation: Installation) -> None:
    lines = installation.quick("experiment", "logs", "1").stdout.splitlines()
    followed = installation.quick("trial", "logs", "1", "--follow").stdout.splitlines()
    assert lines == followed
    assert lines == installation.quick("logs", "1").stdout.splitlines()
    entries = [
        json.loads(line)
        for line in installation.quick("trial", "logs", "1", "--json").stdout.splitlines()
    ]
    assert len(entries) == len(lines)
    assert len(installation.quick("trial", "logs", "1", "--tail", "2").stdout.splitlines()) == 2
    ranks = installation.quick("experiment", "logs", "1", "--rank", "0").stdout.splitlines()
    assert ranks == [line for line in lines if "[rank 0]" in line]


def test_experiment_change_fork_archive_delete(installation: Installation) -> None:
    fork = installation.quick("experiment", "fork", "1").stdout.strip()
    assert installation.quick("experiment", "wait", fork).stdout.strip() == "COMPLETED"
    arguments = ("--name", "again", "--label", "a", "--label", "b", "--notes", "a note")
    installation.quick("experiment", "change", fork, *arguments)
    resource = installation.json("experiment", "describe", fork)
    assert (resource["name"], resource["labels"], resource["notes"]) == (
        "again",
        ["a", "b"],
        "a note",
    )
    assert "at least one of" in installation.quick("experiment", "change", fork, expect=2).stderr
    installation.quick("experiment", "archive", fork)
    assert installation.json("experiment", "describe", fork)["archived"]
    installation.quick("experiment", "unarchive", fork)
    assert "Aborted" in installation.cli("experiment", "delete", fork, expect=1).stderr
    installation.quick("experiment", "delete", fork, "--yes")
    assert f"{fork}" in installation.quick("experiment", "describe", fork, expect=2).stderr


def test_invalid_file_is_rejected_before_start(installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(MODEL)
    engine = {"train_batch_sise": 8, "gradient_clipping": "much"}
    (tmp_path / "ds_config.json").write_text(json.dumps(engine))
    content = experiment(hyperparameters={"deepspeed_config": "ds_config.json"}, max_restart=1)
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(content))
    before = len(installation.client.experiments())
    for command in ("run", "submit"):
        refused = installation.quick(command, tmp_path / "experiment.yaml", expect=2)
        assert refused.stdout == ""
        for word in ("train_batch_sise", "train_batch_size", "gradient_clipping", "max_restart"):
            assert word in refused.stderr
        assert "Traceback" not in refused.stderr
    assert len(installation.client.experiments()) == before
    checked = installation.quick("config", "check", tmp_path / "ds_config.json", expect=2)
    assert "did you mean 'train_batch_size'" in checked.stderr


def test_impossible_trial_shows_reason(installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(MODEL)
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment(slots=8)))
    submitted = installation.quick("submit", tmp_path)
    experiment_id = submitted.stdout.strip()
    reason = "it needs 8 slots on one machine, and there are at most 2"
    assert f"experiment {experiment_id} waits: {reason}" in submitted.stderr
    for arguments in (("experiment", "describe"), ("trial", "list")):
        assert reason in installation.quick(*arguments, experiment_id).stdout
    trial = installation.json("trial", "list", experiment_id)[0]
    assert trial["waiting_reason"].startswith(reason)
    assert reason in installation.quick("trial", "describe", str(trial["id"])).stdout
    queue = installation.quick("job", "list").stdout.splitlines()
    assert any(line.startswith(f"experiment {experiment_id} waits: {reason}") for line in queue)
    shown = installation.quick("job", "set", "priority", experiment_id, "7").stdout
    assert shown == f"experiment {experiment_id} has priority 7\n"
    shown = installation.quick("job", "set", "weight", experiment_id, "2.5").stdout
    assert shown == f"experiment {experiment_id} has weight 2.5\n"
    installation.quick("pool", "set", "default", "--policy", "fifo")
    for arguments in (("priority", "42"), ("weight", "1")):
        shown = installation.quick("job", "set", arguments[0], experiment_id, arguments[1]).stdout
        assert shown.endswith("which has no effect: the policy of pool default is fifo\n")
    installation.quick("pool", "set", "default", "--policy", "fair_share")
    table = [line for line in queue if " waits: " not in line]
    assert max(map(len, table)) <= 80  # in a pipe, too
    process = subprocess.Popen(
        [sys.executable, "-m", "zerolab", "run", str(tmp_path)],
        env=installation.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        first, second, charts, third = (process.stderr.readline() for _ in range(4))
        other = first.split()[2]
        assert charts.startswith(f"live charts: {installation.client.url}")
        assert second.startswith(f"experiment {other} waits: {reason}")
        assert reason in third
    finally:
        process.kill()
        process.communicate()
    for item in (experiment_id, other):
        installation.quick("experiment", "kill", item)


def test_experiment_list_fits_80_columns(installation: Installation, tmp_path: Path) -> None:
    long = experiment(name="a name that is as long as names of experiments are in real life")
    long["searcher"]["metric"] = "validation/mean_average_precision"
    experiment_id = installation.submit(tmp_path / "m", long, {"model_def.py": MODEL}, ["--paused"])
    drawn = on_a_terminal(installation, "experiment", "list", columns=80)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", drawn).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.split()[:1] == [str(experiment_id)]]
    assert len(rows) == 1, lines
    row = rows[0]
    assert row.split()[1:3] == ["a", "name"]
    assert "PAUSED" in row
    rule = next(index for index, line in enumerate(lines) if "\u2500" in line)
    listed = [line.split()[0] for line in takewhile(str.strip, lines[rule + 1 :])]
    ids = [str(item["id"]) for item in installation.client.experiments()]
    assert sorted(listed) == sorted(ids), lines  # a line each
    assert long["name"] in installation.quick("experiment", "list").stdout
    installation.quick("experiment", "kill", str(experiment_id))


def test_group_aliases(installation: Installation) -> None:
    lines = installation.json("experiment", "list")
    for word in ("experiments", "exp", "e"):
        assert installation.json(word, "list") == lines
    assert installation.json("trials", "list", "1") == installation.json("trial", "list", "1")
    assert "No such command 'planet'" in installation.quick("planet", expect=2).stderr


def test_invalid_option_message(installation: Installation) -> None:
    state = installation.quick("experiment", "list", "--state", "BROKEN", expect=2).stderr
    assert "state: must be 'ACTIVE', 'PAUSED'" in state
    assert "got 'BROKEN'" in state
    limit = installation.quick("experiment", "list", "--limit", "0", expect=2).stderr
    assert "limit: must be at least 1, got '0'" in limit
    for arguments in (("up",), ("run", "experiment.yaml")):
        port = installation.quick(*arguments, "--port", "80000", expect=2).stderr
        assert "Invalid value for '--port'" in port
        assert "must be a whole number from 0 to 65535, got '80000'" in port
    assert "Missing argument" in installation.quick("run", expect=2).stderr
    assert "Usage: " in installation.quick("run", expect=2).stderr


def test_broken_pipe_is_silent() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    file = Path(__file__).parents[2] / "examples" / "digits" / "smoke.yaml"
    arguments = [sys.executable, "-m", "zerolab", "plan", str(file)]
    done = subprocess.run(arguments, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.stderr, done.returncode) == ("", 141)


def test_missing_resource_is_one_message(installation: Installation, tmp_path: Path) -> None:
    for arguments in (
        ("experiment", "describe", "999"),
        ("experiment", "pause", "999"),
        ("trial", "describe", "999"),
        ("trial", "logs", "999"),
        ("checkpoint", "describe", "no-such-uuid"),
        ("submit", str(tmp_path / "nowhere.yaml")),
        ("import", str(tmp_path / "nowhere.jsonl")),
    ):
        refused = installation.quick(*arguments, expect=2)
        assert refused.stderr.startswith("zerolab: "), refused.stderr
        assert "Traceback" not in refused.stderr
    missing = installation.quick("trial", "describe", "999", expect=2).stderr
    assert missing == (
        "zerolab: there is no trial 999; `zerolab trial list EXPERIMENT` lists them\n"
    )


@pytest.mark.parametrize("argument", ["abc", "0", "1.5", "99999999999999999999", "\u0663", ""])
@pytest.mark.parametrize(
    "command", ["experiment describe", "trial logs", "job move", "checkpoint list"]
)
def test_invalid_id_names_list_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, argument: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["zerolab", *command.split(), argument])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    noun = "trial" if command.startswith("trial") else "experiment"
    assert f"a whole number from 1, got {argument!r}; `zerolab {noun} list" in " ".join(
        shown.split()
    )


def test_run_exits_with_1_after_failure(installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(MODEL.replace("self.context = context", "1 / 0", 1))
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment()))
    failed = installation.quick("run", tmp_path / "experiment.yaml", expect=1)
    shown = fields(failed.stdout)
    assert shown["state"] == "ERROR"
    assert "ZeroDivisionError" in shown["error"]
    logs = installation.quick("experiment", "logs", shown["experiment"]).stdout
    assert "1 / 0" in logs
    assert (
        installation.quick("experiment", "wait", shown["experiment"], expect=1).stdout == "ERROR\n"
    )


def test_test_mode_trains_one_batch(installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(MODEL)
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment(10_000)))
    shown = fields(installation.quick("run", "--test", tmp_path / "experiment.yaml").stdout)
    trial = installation.json("trial", "list", shown["experiment"])[0]
    assert trial["steps_completed"] == 1
    assert shown["checkpoint"].split()[0] == trial["best_checkpoint"]
    assert "(test)" in installation.quick("experiment", "list").stdout


# Background processes of a shell ignore SIGINT, and their children inherit that: these tests, too.
HEEDS_CTRL_C = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from zerolab.cli.main import main
from zerolab.cli.output import number, without_lengths
main()
"""


def test_ctrl_c_detaches_from_run(installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(MODEL)
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment(1_000_000)))
    process = subprocess.Popen(
        [sys.executable, "-c", HEEDS_CTRL_C, "run", str(tmp_path / "experiment.yaml")],
        env=installation.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert "submitted experiment" in first
        experiment_id = int(first.split()[2])
        for line in process.stderr:
            if "running" in line:
                break
        os.kill(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"experiment {experiment_id} continues in the background" in stderr

    (trial,) = until(
        "the trial has trained",
        lambda: installation.client.trials(experiment_id),
        lambda trials: trials[0]["steps_completed"],
    )
    installation.quick("experiment", "pause", str(experiment_id))
    installation.wait_for(experiment_id, "PAUSED")
    paused = until(
        "it has left with a checkpoint",
        lambda: installation.client.trial(trial["id"]),
        lambda trial: trial["state"] == "PAUSED" and trial["latest_checkpoint"],
    )
    assert paused["steps_completed"] >= trial["steps_completed"]
    installation.quick("experiment", "activate", str(experiment_id))
    until(
        "it has continued",
        lambda: installation.client.trial(trial["id"]),
        lambda trial: trial["steps_completed"] > paused["steps_completed"],
    )
    installation.quick("experiment", "cancel", str(experiment_id))
    assert installation.wait_for(experiment_id)["state"] == "CANCELED"
    assert installation.client.trial(trial["id"])["restarts"] == 0


def test_terminal_progress_is_table(installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(MODEL)
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment()))
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "zerolab", "run", str(tmp_path / "experiment.yaml")],
        env={**installation.environment(), "TERM": "xterm", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
    )
    os.close(slave)
    drawn = b""
    with contextlib.suppress(OSError):  # error of a terminal without writers
        while piece := os.read(master, 65536):
            drawn += piece
    os.close(master)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert fields(out)["state"] == "COMPLETED"
    for word in (b"line", b"trial", b"batch", b"loss", b"samples/s", b"left"):
        assert word in drawn


FRUITLESS = """
import zerolab.core
with zerolab.core.init() as context:
    context.train.report_training_metrics(1, {"loss": 0.5})
"""


def test_missing_result_has_color_and_reason(installation: Installation, tmp_path: Path) -> None:
    config = {
        "name": "fruitless",
        "entrypoint": "python train.py",
        "searcher": {"name": "single", "metric": "loss", "max_length": 1},
    }
    (tmp_path / "train.py").write_text(FRUITLESS)
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(config))
    ran = installation.cli("run", str(tmp_path / "experiment.yaml"))
    shown = fields(ran.stdout)
    problem = "no trial reported a number for the searcher's metric 'loss'"
    assert (shown["state"], shown["no result"]) == ("COMPLETED", problem)
    number = int(shown["experiment"])
    listed = on_a_terminal(installation, "experiment", "list")
    row = next(line for line in listed.splitlines() if "fruitless" in line)
    assert re.search(r"\x1b\[33mCOMPLETED", row)
    assert f"experiment {number} has no result: {problem}" in listed
    described = on_a_terminal(installation, "experiment", "describe", str(number))
    assert "\x1b[33mCOMPLETED\x1b[0m" in described
    assert "\x1b" not in installation.quick("experiment", "list").stdout
    (trial,) = installation.client.trials(number)
    listed = installation.quick("trial", "list", str(number)).stdout
    assert f"trial {trial['id']} has no result: it ended without a validation" in listed


def on_a_terminal(installation: Installation, *arguments: str, columns: int = 120) -> str:
    """Return the output of a command on a terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**installation.environment(), "TERM": "xterm"}
    for name in ("COLUMNS", "NO_COLOR"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "zerolab", *arguments]
    process = subprocess.Popen(command, env=environment, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    drawn = b""
    with contextlib.suppress(OSError):  # error of a terminal without writers
        while piece := os.read(master, 65536):
            drawn += piece
    os.close(master)
    assert process.wait() == 0
    return drawn.decode()


def test_submit_paused_and_kill(installation: Installation, tmp_path: Path) -> None:
    files = {"model_def.py": MODEL}
    waiting = installation.submit(tmp_path / "model", experiment(), files, ["--paused"])
    assert installation.client.experiment(waiting)["state"] == "PAUSED"
    timed_out = installation.quick(
        "experiment", "wait", str(waiting), "--timeout", "0.1", expect=124
    )
    assert timed_out.stdout.strip() == "PAUSED"
    installation.quick("experiment", "kill", str(waiting))
    assert installation.wait_for(waiting)["state"] == "CANCELED"


def test_import_metrics(installation: Installation, tmp_path: Path) -> None:
    spec = RunSpec(
        experiment_id=0,
        trial_id=0,
        run_id=0,
        config=experiment(),
        hparams={"width": 3},
        trial_seed=1,
        slots=1,
        model_dir=str(tmp_path),
        run_dir=str(tmp_path),
        checkpoint_dir=str(tmp_path),
    )
    file = MetricsFile(tmp_path / "metrics.jsonl", spec)
    for step in (1, 2, 3):
        file.append(file.encode(MetricsRecord("training", step, {"loss": 1.0 / step}, 0.0)))
    file.close()
    imported = installation.quick("import", tmp_path / "metrics.jsonl").stdout.strip()
    trial = installation.json("trial", "list", imported)[0]
    curves = installation.json("trial", "metrics", str(trial["id"]), "--name", "loss")
    assert [step for step, _ in curves[0]["points"]] == [1, 2, 3]
    assert trial["hparams"] == {"width": 3}


def test_plan_command(installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(MODEL)
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment()))
    shown = installation.cli("plan", tmp_path / "experiment.yaml").stdout
    assert "2 parameters" in shown


def test_status_agent_job_token_open(installation: Installation) -> None:
    url = installation.quick("status", "--url").stdout.strip()
    token = installation.quick("token").stdout.strip()
    request = urllib.request.Request(
        f"{url}/api/v1/info", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request) as response:
        assert json.loads(response.read())["home"] == str(installation.home.path)
    assert installation.json("status")["info"]["cluster"]["slots"] == 2
    assert url in installation.quick("status").stdout
    assert [len(item["slots"]) for item in installation.json("agent", "list")] == [2]
    assert "cpu" in installation.quick("agent", "list").stdout
    assert isinstance(installation.json("job", "list"), list)
    assert "in use" in installation.quick("job", "list").stdout
    assert installation.quick("open", "--no-browser").stdout.startswith(url)
    assert installation.quick("version").stdout.strip()


def test_missing_server_has_remedy(tmp_path: Path) -> None:
    empty_home = Installation(tmp_path / "home")
    refused = empty_home.quick("experiment", "list", expect=2)
    assert "start one with `zerolab up`" in refused.stderr
    assert "start one with `zerolab up`" in empty_home.quick("status", expect=1).stderr
    arguments = ("--master", "http://127.0.0.1:9", "experiment", "list")
    assert (
        "no Zerolab server responds at http://127.0.0.1:9"
        in empty_home.quick(*arguments, expect=2).stderr
    )


def test_run_starts_agent_only_if_none_is_connected(tmp_path: Path) -> None:
    separate = Installation(tmp_path / "home")
    (tmp_path / "model_def.py").write_text(MODEL)
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump(experiment(2)))
    try:
        separate.cli("up", "--no-agent", "--port", str(separate.port))
        command = [sys.executable, "-m", "zerolab", "agent", "start", "--name", "worker-1"]
        with subprocess.Popen(
            [*command, "--cpu", "--slots", "1"],
            env=separate.environment(), stderr=subprocess.DEVNULL,
        ) as worker:  # fmt: skip
            until("the worker is connected", separate.client.agents, bool)
            assert "starting an agent" not in separate.cli("run", file).stderr
            assert [agent["name"] for agent in separate.client.agents()] == ["worker-1"]
            worker.terminate()
        assert "starting an agent" in separate.cli("run", file, "--cpu").stderr
    finally:
        separate.destroy()


def test_config_check_without_server(tmp_path: Path) -> None:
    empty_home = Installation(tmp_path / "home")
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_batch_size": 64, "gradient_accumulation_steps": 2}')
    shown = empty_home.quick("config", "check", file, "--world-size", "4").stdout
    assert "train_micro_batch_size_per_gpu" in shown
    assert "8" in shown
    assert (
        "world-size" in empty_home.quick("config", "check", file, "--world-size=0", expect=2).stderr
    )


TRAINS_WITH_DEEPSPEED = """
import os
import deepspeed, torch
settings = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 1), config=settings)
engine.backward(engine(torch.ones(4, 2)).sum())
engine.step()
assert engine.global_steps == 1
maker = type(engine).__module__.partition(".")[0]
place = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
print(place, "trained a batch of", engine.train_batch_size(), "with", maker)
"""


def test_task_workers_and_all_slots(installation: Installation, tmp_path: Path) -> None:
    script = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    (tmp_path / "main.py").write_text(script)
    (tmp_path / "ds.py").write_text(TRAINS_WITH_DEEPSPEED)
    arguments = ["task", "run", "--name", "workers", "--context", tmp_path, "--follow"]
    both = ["--worker", '{"worker": {"count": 1, "gpus": 2}}', "--per", "worker", "--as-deepspeed"]
    done = installation.quick(*arguments, *both, "--", "python", "ds.py")
    assert "rank 0 of 1 trained a batch of 4 with zerotrial" in done.stdout
    done = installation.quick(*arguments, "--worker", "ALL_WORKERS", "--", "python", "main.py")
    assert f"rank {installation.slots - 1} of {installation.slots}" in done.stdout


def test_task_id_precedes_name(installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("import time; time.sleep(1000)")
    arguments = [
        "--context",
        tmp_path,
        "--slots",
        str(installation.slots),
        "--",
        "python",
        "main.py",
    ]
    first = installation.quick("task", "run", "--name", "meant", *arguments).stdout.strip()
    other = installation.quick("task", "run", "--name", first, *arguments).stdout.strip()
    shown = installation.quick("task", "stop", first, "--kill").stderr
    assert f"task meant ({first}) is stopping" in shown
    shown = installation.quick("task", "stop", other, "--kill").stderr
    assert f"task {first} ({other}) is stopping" in shown
    arguments = ["task", "run", "--name", "odd", "--context", tmp_path, "--", "a", "\udcff"]
    assert (
        "must be text of whole characters (UTF-8), got '\\udcff'"
        in installation.quick(*arguments, expect=2).stderr
    )


def test_task_run_list_stop(installation: Installation, tmp_path: Path) -> None:
    script = (
        "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], "
        "'on', os.environ['ALL_WORKERS'])"
    )
    arguments = ["task", "run", "--name", "count", "--label", "daily", "--context", tmp_path]
    workers = '{"worker": {"count": 2, "gpus": 1}}'
    (tmp_path / "main.py").write_text(script)
    done = installation.quick(
        *arguments, "--worker", workers, "--follow", "--", "python", "main.py"
    )
    assert "rank 0 of 2" in done.stdout
    assert f"rank 1 of 2 on {socket.gethostname()}" in done.stdout
    described = fields(installation.quick("task", "describe", "count").stdout)
    assert described["state"] == "COMPLETED"
    assert (described["labels"], described["slots"]) == ("daily", "2")
    assert described["command"] == "python main.py"
    ended = described["task"].partition(":")[0]
    shown = installation.quick("task", "stop", "count").stderr
    assert shown == f"task count ({ended}) has already ended: COMPLETED\n"
    assert installation.json("task", "list", "--name", "cou", "--state", "completed")
    assert not installation.json("task", "list", "--name", "cou", "--state", "ACTIVE")
    assert len(installation.json("task", "list", "--limit", "1")) == 1
    assert installation.json("task", "describe", ended)["labels"] == ["task", "daily"]
    assert "rank 1 of 2" in installation.quick("task", "logs", "count", "--rank", "1").stdout

    (tmp_path / "main.py").write_text("import time; time.sleep(1000)")
    waiting = installation.quick(*arguments, "--", "python", "main.py").stdout.strip()
    every = ["--slots", str(installation.slots), "--queue-time", "1"]
    timed_out = installation.quick(*arguments, *every, "--", "true").stdout.strip()
    resource = until(
        "the task that may wait for a second has ended",
        lambda: installation.json("task", "list"),
        lambda tasks: tasks[0]["state"] == "ERROR",
    )
    assert str(resource[0]["id"]) == timed_out
    assert "queue_time" in installation.json("experiment", "describe", timed_out)["error"]
    queued = installation.quick(*arguments, *every[:2], "--", "true").stdout.strip()
    which = f"count: 2 tasks of this name have not ended: give the id of one ({queued}, {waiting})"
    assert which in installation.quick("task", "stop", "count", expect=2).stderr
    installation.quick("task", "stop", queued, "--kill")
    until(
        "the queued task has ended",
        lambda: installation.json("task", "list")[0]["state"],
        "CANCELED".__eq__,
    )
    # Not the newest with that name, which has ended.
    assert f"task count ({waiting})" in installation.quick("task", "stop", "count", "--kill").stderr
    resource = until(
        "the task has ended",
        lambda: installation.json("task", "list"),
        lambda tasks: tasks[2]["state"] == "CANCELED",
    )
    assert [str(resource[2]["id"]), resource[3]["state"]] == [waiting, "COMPLETED"]
    both = installation.quick(*arguments, "--slots", "1", "--worker", "2", "--", "a", expect=2)
    assert "--worker: must look like" in both.stderr
    assert "only one of them may be given" in both.stderr
    assert (
        "there is no task 'nothing'"
        in installation.quick("task", "logs", "nothing", expect=2).stderr
    )
