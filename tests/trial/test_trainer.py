"""Training from a user's script: standalone, under torchrun, and inside the platform."""

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import zerotrial
from tests.trial.helpers import LineTrial, last_checkpoint, make_spec, metrics, records
from tests.waiting import DEADLINE_S
from zerolab.contract.spec import ENV_RUN_SPEC, write_run_spec
from zerolab.errors import ConfigError, NotFoundError
from zerolab.storage.store import CheckpointStore, new_uuid
from zerotrial import Batch, Epoch, StopReason, Trainer
from zerotrial.loop.console import Console


@pytest.fixture(autouse=True)
def _standalone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (ENV_RUN_SPEC, "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def fit(**options):
    """Return the result of a fit and its trial."""
    with zerotrial.init(hparams={"accumulation": 2, "samples": 20}, seed=3) as context:
        trial = LineTrial(context)
        return Trainer(trial, context).fit(**options), trial


def test_script_trains_and_writes_metrics_file(tmp_path: Path) -> None:
    result, trial = fit(max_length=Epoch(2), reporting_period=Batch(1), checkpoint_policy="none")
    assert result.stop_reason is StopReason.FINISHED
    assert len(trial.seen) == 20
    run = tmp_path / "zerolab_run"
    assert sorted(metrics(run, "training")) == list(range(1, 11))
    assert records(run, "header")[0]["hparams"] == {"accumulation": 2, "samples": 20}
    assert last_checkpoint(run).steps_completed == 10


@pytest.mark.parametrize("source_kind", ["latest", "uuid", "path"])
def test_script_resumes_at_the_exact_sample(tmp_path: Path, source_kind: str) -> None:
    _, uninterrupted = fit(max_length=Batch(9), reporting_period=Batch(1))
    expected = metrics(tmp_path / "zerolab_run", "training")
    (tmp_path / "zerolab_run").rename(tmp_path / "whole")
    _, first = fit(max_length=Batch(4), reporting_period=Batch(1))
    uuid = last_checkpoint(tmp_path / "zerolab_run").uuid
    path = tmp_path / "zerolab_run" / "checkpoints" / uuid
    source = {"latest": "latest", "uuid": uuid, "path": path}[source_kind]
    _, second = fit(max_length=Batch(9), reporting_period=Batch(1), latest_checkpoint=source)
    assert first.seen + second.seen == uninterrupted.seen
    assert metrics(tmp_path / "zerolab_run", "training") == expected
    for a, b in zip(
        uninterrupted.engine.module.parameters(), second.engine.module.parameters(), strict=True
    ):
        assert torch.equal(a, b)


def test_each_fit_is_its_own_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second fit has its own metrics file and prints its own checkpoint."""
    fit(max_length=Batch(8), reporting_period=Batch(1))
    with caplog.at_level("INFO", logger="zerotrial.progress"):
        fit(max_length=Batch(3), reporting_period=Batch(1))
    first, second = tmp_path / "zerolab_run", tmp_path / "zerolab_run-2"
    assert sorted(metrics(first, "training")) == list(range(1, 9))
    assert sorted(metrics(second, "training")) == [1, 2, 3]
    saved = last_checkpoint(second)
    assert saved.steps_completed == 3
    assert f"checkpoint  zerolab_run-2/checkpoints/{saved.uuid}" in caplog.text
    assert len(records(first, "header")) == len(records(second, "header")) == 1


def test_concurrent_scripts_have_their_own_directories(tmp_path: Path) -> None:
    """A script that has not trained yet keeps its directory; an idle one gives it up."""
    with zerotrial.init(hparams={"samples": 20}):
        code = "import zerotrial\nwith zerotrial.init() as context: print(context.spec.run_dir)"
        command = [sys.executable, "-c", code]
        other = subprocess.run(command, capture_output=True, text=True, check=True)
        assert other.stdout.strip() == str(tmp_path / "zerolab_run-2")
    with zerotrial.init() as context:
        assert context.spec.run_dir == str(tmp_path / "zerolab_run")


def test_fit_twice_in_one_context_is_two_runs(tmp_path: Path) -> None:
    with zerotrial.init(hparams={"samples": 20}) as context:
        trainer = Trainer(LineTrial(context), context)
        trainer.fit(max_length=Batch(2))
        first = last_checkpoint(tmp_path / "zerolab_run")
        trainer.fit(max_length=Batch(4), latest_checkpoint="latest")
        trainer.fit(max_length=Batch(3), reporting_period=Batch(1))
    assert last_checkpoint(tmp_path / "zerolab_run").steps_completed == 4
    assert first.steps_completed == 2
    assert last_checkpoint(tmp_path / "zerolab_run-2").steps_completed == 3
    assert min(metrics(tmp_path / "zerolab_run-2", "training")) == 1


def test_resume_continues_in_directory_of_its_checkpoint(tmp_path: Path) -> None:
    """``latest`` selects the newest run, a uuid any run; the fit continues in its directory."""
    for steps in (6, 2):
        fit(max_length=Batch(steps))
    uuid = last_checkpoint(tmp_path / "zerolab_run").uuid
    fit(max_length=Batch(3), latest_checkpoint="latest")
    assert last_checkpoint(tmp_path / "zerolab_run-2").steps_completed == 3
    fit(max_length=Batch(8), latest_checkpoint=uuid)
    assert last_checkpoint(tmp_path / "zerolab_run").steps_completed == 8
    assert not (tmp_path / "zerolab_run-3" / "metrics.jsonl").exists()


@pytest.mark.parametrize("resume", [None, "latest"])
def test_tensorboard_files_are_with_their_run(tmp_path: Path, resume: str | None) -> None:
    class Trial(LineTrial):
        def __init__(self, context):
            super().__init__(context)
            context.get_tensorboard_writer().add_text("note", "hello")

    for steps in (2, 4):
        with zerotrial.init(hparams={"samples": 20}) as context:
            trainer = Trainer(Trial(context), context)
            trainer.fit(max_length=Batch(steps), latest_checkpoint=resume if steps == 4 else None)
    runs = [tmp_path / name / "tensorboard" for name in ("zerolab_run", "zerolab_run-2")]
    counts = [len(list(run.glob("events*"))) for run in runs]
    assert counts == [1, 1] if resume is None else (counts[0] >= 2 and counts[1] == 0)


@pytest.mark.slow
def test_script_prints_progress_and_result_paths(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    run = tmp_path / "zerolab_run"
    output = done.stderr
    assert "training 5 batches, results in zerolab_run\n" in output
    assert "batch 5 of 5  loss " in output
    assert "batch 5  validation  validation_loss " in output
    assert "metrics     zerolab_run/metrics.jsonl" in output
    assert f"checkpoint  zerolab_run/checkpoints/{last_checkpoint(run).uuid}" in output
    assert "zerolab up && zerolab import zerolab_run/metrics.jsonl" in output
    assert done.stdout.splitlines() == ["rank 0 of 1 5"]


def test_console_logs_every_ten_seconds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    console = Console(tmp_path, 100, lambda: now[0])
    with caplog.at_level("INFO", logger="zerotrial.progress"):
        for step in range(1, 101):
            now[0] = step * 0.5
            console.training(step, {"loss": 1.0, "a": 2.0})
    shown = [int(record.getMessage().split()[1]) for record in caplog.records]
    assert shown == [1, 21, 41, 61, 81, 100]
    assert caplog.records[0].getMessage() == "batch 1 of 100  loss 1  a 2"


def test_unfinished_checkpoint_of_killed_script_is_removed(tmp_path: Path) -> None:
    checkpoints = tmp_path / "zerolab_run" / "checkpoints"
    unfinished = CheckpointStore(checkpoints).begin(new_uuid())
    (unfinished / "model0").mkdir()
    other = CheckpointStore(checkpoints, owner="trial-7").begin(new_uuid())
    fit(max_length=Batch(1))
    assert not unfinished.exists()
    assert other.exists()


def test_unfinished_checkpoint_of_running_script_is_kept(tmp_path: Path) -> None:
    checkpoints = tmp_path / "zerolab_run" / "checkpoints"
    unfinished = CheckpointStore(checkpoints).begin(new_uuid())
    with (tmp_path / "zerolab_run" / ".writing").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fit(max_length=Batch(1))
        assert unfinished.exists()
    fit(max_length=Batch(2))
    assert not unfinished.exists()


def test_fit_argument_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_length: is missing; set the length of training"):
        fit()
    with pytest.raises(ConfigError, match="checkpoint_policy: must be best, all or none"):
        fit(max_length=Batch(1), checkpoint_policy="some")
    with pytest.raises(ConfigError, match=r"must be one number, got Batch\(value=\[3\]\)"):
        fit(max_length=Batch([3]))
    with pytest.raises(ConfigError, match="uuid: must be a checkpoint's uuid, got 'nowhere'"):
        fit(max_length=Batch(1), latest_checkpoint="nowhere")
    with zerotrial.init(hparams={}) as context:
        with pytest.raises(ConfigError, match=r"; write Trainer\(LineTrial\(context\), context\)"):
            Trainer(LineTrial, context)
        with pytest.raises(ConfigError, match="trial: must be an instance of a ZeroTrial, got 3"):
            Trainer(3, context)
    with pytest.raises(NotFoundError, match="not found in"):
        fit(max_length=Batch(1), latest_checkpoint="00000000-0000-0000-0000-000000000000")
    assert fit(max_length=Batch(1), latest_checkpoint="latest")[0] == StopReason.FINISHED


def test_auto_values_use_hparams_within_context() -> None:
    content = {"train_micro_batch_size_per_gpu": "auto", "optimizer": {"type": "AdamW"}}
    with zerotrial.init(hparams={"micro_batch_size": 3}):
        engine = zerotrial.initialize(model=torch.nn.Linear(1, 1), config=content)[0]
        assert engine.train_micro_batch_size_per_gpu() == 3
    with pytest.raises(ConfigError, match="got 'auto', which nothing determines"):
        zerotrial.initialize(model=torch.nn.Linear(1, 1), config=content)


def test_test_mode_runs_one_batch(tmp_path: Path) -> None:
    _, trial = fit(test_mode=True)
    assert len(trial.seen) == 2
    assert sorted(metrics(tmp_path / "zerolab_run", "validation")) == [1]


def test_experiment_settings_apply_inside_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "entrypoint": "python train.py",
        "searcher": {"metric": "validation_loss", "max_length": {"batches": 6}},
        "scheduling_unit": 2,
        "min_validation_period": {"batches": 3},
    }
    spec = make_spec(tmp_path / "run", {"accumulation": 1, "samples": 8}, config=config)
    file = tmp_path / "run.json"
    write_run_spec(spec, file)
    monkeypatch.setenv(ENV_RUN_SPEC, str(file))
    _, trial = fit()
    assert trial.context.get_trial_seed() == 7
    assert len(trial.seen) == 6
    assert sorted(metrics(tmp_path / "run", "training")) == [1, 2, 4, 6]
    assert sorted(metrics(tmp_path / "run", "validation")) == [3, 6]
    latest = last_checkpoint(tmp_path / "run")
    write_run_spec(msgspec.structs.replace(spec, latest_checkpoint=latest), file)
    _, trial = fit(max_length=Batch(8), validation_period=Batch(8))
    assert len(trial.seen) == 2


SCRIPT = """
import sys
import zerotrial
from tests.trial.helpers import LineTrial

with zerotrial.init(hparams={"stage": 1, "samples": 20}) as context:
    trial = LineTrial(context)
    zerotrial.Trainer(trial, context).fit(
        max_length=zerotrial.Batch(5), reporting_period=zerotrial.Batch(5)
    )
    ranks = context.distributed
    sys.stdout.write(f"rank {ranks.rank} of {ranks.size} {len(trial.seen)}\\n")
"""


@pytest.mark.processes
def test_script_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(root),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # With torch 2.8 and 2.9 lines of Gloo are mixed into the ranks' shared output.
    assert sorted(re.findall(r"rank \d of \d \d+", done.stdout)) == [
        "rank 0 of 2 5",
        "rank 1 of 2 5",
    ]
    assert sorted(metrics(tmp_path / "zerolab_run", "training")) == [5]
