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
    for _ in range(1000):
        if micro == 1:
            os.kill(os.getpid(), 11)  # a crash is a result, too
        activations = torch.empty(micro, 100_000_000)  # 400 MB a sample, never touched
        loss = engine(torch.ones(micro, 8)).mean()
        engine.backward(loss)
        engine.step()
        del activations
    raise SystemExit("the autotuner ends a run before its last step")
"""


SHORT_SCRIPT = """
    import argparse, torch, zerotrial

    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    arguments = parser.parse_args()
    engine, *_ = zerotrial.initialize(arguments, model=torch.nn.Linear(8, 1))
    micro = engine.train_micro_batch_size_per_gpu()
    for _ in range(1000):
        engine.backward(engine(torch.ones(micro, 8)).mean())
        engine.step()
    print(arguments.deepspeed_config, "has micro-batch", micro)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    content = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW"},
        "autotuning": {"enabled": True, "fast": True, "start_profile_step": 1},
    }
    (tmp_path / "ds.json").write_text(json.dumps(content))
    return tmp_path


def autotune(folder: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "zerolab", "autotune", "ds.json", "--ranks", "1", *options]
    return subprocess.Popen(
        [*command, "--", "train.py", "--deepspeed_config", "ds.json"],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


def test_out_of_memory_and_crashes_are_results(folder: Path) -> None:
    options = ["--memory", "1.3", "--max-candidates", "3", "--json"]
    with autotune(folder, *options) as process:
        until("the second candidate runs", lambda: "2 0" in runs_of(folder))
        process.send_signal(signal.SIGKILL)
    runs_before = len(runs_of(folder))
    with autotune(folder, *options) as process:
        output, errors = process.communicate(timeout=600)
    table = (folder / "autotuning_results" / "table.md").read_text()
    assert output, errors
    result = json.loads(output)
    assert "continuing" in errors
    assert runs_of(folder).count("4 0") == 1, "measured before the kill"
    assert runs_before >= 2
    assert "| micro-batch 4 x 2, stage 0 |  |  |  |  |  | out of memory before" in table
    assert "out of memory expected: micro-batch 4 x 2, stage 0 ran out of memory" in table
    assert "killed by SIGSEGV" in table
    assert result["overrides"]["train_micro_batch_size_per_gpu"] == 2
    tuned = json.loads(Path(result["tuned_file"]).read_text())
    assert tuned["gradient_accumulation_steps"] == 4
    assert tuned["optimizer"] == {"type": "AdamW"}
    assert "autotuning" not in tuned
    left = {path.name for path in (folder / "autotuning_results").iterdir()}
    assert left == {"journal.jsonl", "table.md", "ds_config_optimal.json"}


def test_launch_trains_with_the_tuned_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SHORT_SCRIPT))
    block = {"enabled": True, "tuner_num_trials": 1, "max_train_micro_batch_size_per_gpu": 2}
    content = {"train_batch_size": 8, "optimizer": {"type": "Adam"}, "autotuning": block}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    command = "launch --cpu --num_gpus 1 --no_local_rank --autotuning run train.py"
    result = subprocess.run(
        [sys.executable, "-m", "zerolab", *command.split(), "--deepspeed_config=ds.json"],
        cwd=tmp_path, text=True, capture_output=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert "rung 0: micro-batch 2 x 4, stage 0" in result.stderr
    tuned = tmp_path / "autotuning_results" / "ds_config_optimal.json"
    assert f"{tuned} has micro-batch 2" in result.stdout


def runs_of(folder: Path) -> list[str]:
    """Micro-batch and stage of the runs that built an engine."""
    file = folder / "runs.txt"
    return file.read_text().splitlines() if file.exists() else []
