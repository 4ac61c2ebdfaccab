"""``zerolab autotune`` with real processes and memory limits."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.waiting import until
from zerolab.config import load_engine_config
from zerolab.errors import ConfigError
from zerolab.launcher.devices import find_slots
from zerotrial.extensions.autotune.candidates import Candidate, Layout
from zerotrial.extensions.autotune.exchange import Request, RunFiles
from zerotrial.extensions.autotune.measured_run import MeasuredRun
from zerotrial.extensions.autotune.settings import Settings
from zerotrial.extensions.autotune.subjects import ExperimentSubject
from zerotrial.extensions.autotune.tuning import tune

pytestmark = pytest.mark.processes

SCRIPT = """
    import argparse, os, torch, zerotrial

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--deepspeed_config")
    arguments = parser.parse_args()
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    engine, *_ = zerotrial.initialize(
        arguments, model=model, model_parameters=model.parameters()
    )
    micro = engine.train_micro_batch_size_per_gpu()
    with open("runs.txt", "a") as file:
        print(micro, engine.zero_optimization_stage(), file=file)
    for _ in range(200):
        if micro == 1:
            os.kill(os.getpid(), 11)  # a crash is a result, too
        activations = torch.empty(micro, 100_000_000)  # 400 MB a sample, never touched
        loss = engine(torch.ones(micro, 8)).mean()
        engine.backward(loss)
        engine.step()
        del activations
    print("trained with", arguments.deepspeed_config)  # not in a measured run
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    content = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW"},
        "autotuning": {
            "enabled": True,
            "fast": True,
            "start_profile_step": 1,
            "tuner_num_trials": 3,
        },
    }
    (tmp_path / "ds.json").write_text(json.dumps(content))
    return tmp_path


def zerolab(folder: Path, command: str) -> "subprocess.Popen[str]":
    """Start a command; a micro-batch of 4 does not fit into the memory of its processes."""
    limited = ["bash", "-c", 'ulimit -d 1270000; exec "$@"', "-", sys.executable]
    return subprocess.Popen(
        [*limited, "-m", "zerolab", *command.split(), "--deepspeed_config=ds.json"],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_out_of_memory_and_crashes_are_results(folder: Path) -> None:
    with zerolab(folder, "autotune ds.json --cpu --ranks 1 -- train.py") as process:
        until("the second candidate runs", lambda: "2 0" in runs_of(folder))
        process.send_signal(signal.SIGKILL)
    runs_before = len(runs_of(folder))
    with zerolab(folder, "launch --cpu --num_gpus 1 --autotuning run train.py") as process:
        output, errors = process.communicate(timeout=600)
    results = folder / "autotuning_results"
    assert {path.name for path in results.iterdir()} == {
        "journal.jsonl", "table.md", "ds_config_optimal.json",
    }  # fmt: skip
    table = (results / "table.md").read_text()
    assert "continuing" in errors
    assert runs_of(folder).count("4 0") == 1, "measured before the kill"
    assert runs_before >= 2
    assert "| micro-batch 4 x 2, stage 0 |  |  |  |  |  | out of memory before" in table
    assert "out of memory expected: micro-batch 4 x 2, stage 0 ran out of memory" in table
    assert "killed by SIGSEGV" in table
    tuned = json.loads((results / "ds_config_optimal.json").read_text())
    assert tuned["train_micro_batch_size_per_gpu"] == 2
    assert tuned["gradient_accumulation_steps"] == 4
    assert tuned["optimizer"] == {"type": "AdamW"}
    assert "autotuning" not in tuned
    assert f"trained with {results / 'ds_config_optimal.json'}" in output


def runs_of(folder: Path) -> list[str]:
    """Micro-batch and stage of the runs that built an engine."""
    file = folder / "runs.txt"
    return file.read_text().splitlines() if file.exists() else []


TRIAL = """
    import torch, zerotrial

    class Trial(zerotrial.ZeroTrial):
        def __init__(self, context):
            self.context = context
            hparams = context.get_hparams()
            config = zerotrial.overwrite_deepspeed_config(
                hparams["deepspeed_config"], hparams.get("overwrite_deepspeed_args", {})
            )
            engine = zerotrial.initialize(model=torch.nn.Linear(8, 1), config=config)[0]
            self.engine = context.wrap_model_engine(engine)

        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            loss = self.engine(next(dataloader_iter)).mean()
            self.engine.backward(loss)
            self.engine.step()
            return loss

        def evaluate_batch(self, dataloader_iter):
            return {"loss": self.engine(next(dataloader_iter)).mean()}

        def build_training_data_loader(self):
            size = self.context.get_train_micro_batch_size_per_gpu()
            return zerotrial.DataLoader(torch.ones(64, 8), batch_size=size)

        build_validation_data_loader = build_training_data_loader
"""
EXPERIMENT = """
    entrypoint: model:Trial
    hyperparameters:
      deepspeed_config: {train_batch_size: 16, optimizer: {type: Adam}}
    searcher: {name: single, metric: loss, max_length: {batches: 3}}
    resources: {slots_per_trial: 2}
"""


def test_experiment_is_tuned_on_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(textwrap.dedent(TRIAL))
    file = tmp_path / "experiment.yaml"
    settings = Settings(max_candidates=1, results_dir=tmp_path / "results")
    slots = find_slots(2, cpu=True)

    file.write_text(EXPERIMENT)
    tuning = tune(ExperimentSubject(file), slots, settings)
    assert tuning.best.candidate.micro_batch == 4
    assert tuning.best.candidate.accumulation_steps == 2
    assert tuning.best.results[0].rows == 4
    assert len(tuning.best.results[0].step_seconds) >= 3
    assert 0 < tuning.best.memory < 4e9
    assert tuning.cpu_s > 0


def test_engine_without_the_settings_is_an_error(tmp_path: Path) -> None:
    config = load_engine_config({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 16})
    candidate = Candidate(4, 4, Layout(0))
    run = MeasuredRun(RunFiles(tmp_path), Request(candidate), config, is_first=True)
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu: must be 4, as the"):
        run.check()
    (measurement,) = RunFiles(tmp_path).read_measurements()
    assert "got 16" in measurement.mismatch
