"""Trials with a pipeline engine: stop, resume, and change of the layout."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.ranks import run_on_ranks
from tests.trial.helpers import fit, last_checkpoint, make_settings, make_spec, metrics
from tests.waiting import DEADLINE_S
from zerotrial.ranks import Distributed

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS, BATCHES, STOP = 4, 7, 3

HPARAMS = {"width": 16, "depth": 4, "heads": 2, "context": 8, "text_bytes": 4000}
CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "steps_per_print": 2,
    "wall_clock_breakdown": True,
}
TENSOR_PARALLEL = {
    "tensor_parallel": {
        "size": 2,
        "plan": {"layers.*.feed_forward.0": "colwise", "layers.*.feed_forward.2": "rowwise"},
    }
}


def gpt_trial() -> Any:
    """Return the trial class of the example."""
    spec = importlib.util.spec_from_file_location(
        "example_pipeline_gpt", EXAMPLES / "pipeline_gpt" / "model_def.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PipelineGptTrial


def run_trials(directory: str) -> list[Any]:
    """Train without a stop; then stop and resume in other layouts."""
    distributed = Distributed.from_environment(cuda=False)
    root, seen, calls = Path(directory), [], []

    class Trial(gpt_trial()):  # type: ignore[misc]
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            calls.append((self.engine.num_stages, dataloader_iter is None))
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    for name, stages, end, overrides in (
        ("whole", 4, BATCHES, {}),
        ("cut", 4, STOP, {}),
        ("cut", 4, STOP + 1, {}),
        ("cut", 2, STOP + 2, {}),
        ("cut", 2, STOP + 3, TENSOR_PARALLEL),
        ("cut", 1, BATCHES, {}),
    ):
        config = {**CONFIG, **overrides}
        hparams = {**HPARAMS, "deepspeed_config": config, "pipeline_stages": stages}
        previous_run = distributed.is_chief and (root / name / "metrics.jsonl").exists()
        ref = distributed.broadcast(last_checkpoint(root / name) if previous_run else None)
        settings = make_settings(end)
        _, trial = fit(make_spec(root / name, hparams, ref), Trial, settings, distributed)
        seen.append(trial.engine.global_steps)
        trial.engine.close()
    return [seen, set(calls)]


def test_pipeline_resumes_in_other_layouts(
    tmp_path: Path,
) -> None:
    results = run_on_ranks(run_trials, RANKS, str(tmp_path))
    steps = [BATCHES, STOP, STOP + 1, STOP + 2, STOP + 3, BATCHES]
    assert [seen for seen, _ in results] == [steps] * RANKS
    # Of four stages the inner two read no data, and have no iterator.
    for rank, (_, calls) in enumerate(results):
        assert calls == {(4, rank in {1, 2}), (2, False), (1, False)}
    for group, name in (("training", "loss"), ("validation", "validation_loss")):
        uninterrupted, resumed = (metrics(tmp_path / path, group) for path in ("whole", "cut"))
        assert resumed[BATCHES][name] == pytest.approx(uninterrupted[BATCHES][name], abs=1e-5)
    uninterrupted, resumed = (metrics(tmp_path / path, "training") for path in ("whole", "cut"))
    assert list(resumed) == list(range(1, BATCHES + 1))
    # Bitwise equal with the same number of stages.
    assert resumed[STOP + 1]["loss"] == uninterrupted[STOP + 1]["loss"]
    for step in resumed:
        assert resumed[step]["loss"] == pytest.approx(uninterrupted[step]["loss"], abs=1e-5)
    # The shares of the step time are metrics as well; they sum to one.
    shares = {
        name: value for name, value in uninterrupted[BATCHES - 1].items() if name.endswith("_share")
    }
    assert {"send_share", "receive_share", "tied_gradients_share"} <= shares.keys()
    assert 0 <= shares.pop("hidden_communication_share", 0.0) <= 1
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares.values()) >= 0


@pytest.mark.soak
def test_example_script_resumes_without_pipeline(
    tmp_path: Path,
) -> None:
    folder = EXAMPLES / "pipeline_cifar"
    script = [str(folder / "train.py"), "--deepspeed_config", str(folder / "ds_config.json")]
    save_options = ["--save", str(tmp_path / "kept")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for command in (
        [*torchrun, "--nproc-per-node", "2", *script, "-p", "2", "--steps", "5", *save_options],
        [sys.executable, *script, "-p", "1", "--steps", "10", *save_options],
    ):
        completed = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert completed.returncode == 0, completed.stderr
    assert "step   10" in completed.stdout
