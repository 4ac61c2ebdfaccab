"""Tensor-parallel trials: stop, resume, and continue in one process."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zerotrial
from tests.engine.ranks import run_on_ranks
from tests.trial.helpers import LineTrial, fit, last_checkpoint, make_settings, make_spec, metrics
from zerotrial.context import ZeroTrialContext
from zerotrial.ranks import Distributed

pytestmark = pytest.mark.processes

BATCHES, STOPS = 7, (3, 5)
TENSOR_PARALLEL = {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}


class TensorParallelTrial(LineTrial):
    """Trial of one hidden layer, which two ranks share."""

    def __init__(self, context: ZeroTrialContext) -> None:
        self.context = context
        self.samples, self.seen = 22, []
        self.engine = context.wrap_model_engine(
            zerotrial.initialize(
                model=nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)),
                config={
                    "train_batch_size": 8,
                    "gradient_accumulation_steps": 2,
                    "gradient_clipping": 1.0,
                    "zero_optimization": {"stage": 1},
                    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                    "tensor_parallel": context.get_hparams()["cut"],
                },
            )[0]
        )


def train(
    path: Path, tensor_parallel: dict[str, Any], end: int, ranks: Distributed | None = None
) -> int:
    """Resume from the last checkpoint; return the micro-batch size."""
    latest = last_checkpoint(path) if (path / "metrics.jsonl").exists() else None
    _, trial = fit(
        make_spec(path, {"cut": tensor_parallel}, latest),
        TensorParallelTrial,
        make_settings(end),
        ranks,
    )
    size = trial.context.get_train_micro_batch_size_per_gpu()
    trial.engine.close()
    return int(size)


def train_on_two_ranks(directory: str) -> list[int]:
    """Train on each of two ranks; return the micro-batch sizes."""
    distributed = Distributed.from_environment(cuda=False)
    sizes = []
    for end in STOPS:
        distributed.allgather(None)  # all ranks read before one writes
        sizes.append(train(Path(directory), TENSOR_PARALLEL, end, distributed))
    return sizes


def test_tensor_parallel_trial_resumes_on_one_rank(tmp_path: Path) -> None:
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "cut"
    # Both ranks share one model, and so the same batches.
    assert train(uninterrupted, {}, BATCHES) == 4
    assert run_on_ranks(train_on_two_ranks, 2, str(resumed)) == [[4, 4]] * 2
    train(resumed, {}, BATCHES)
    for group, name in (("training", "loss"), ("validation", "validation_loss")):
        expected, actual = metrics(uninterrupted, group), metrics(resumed, group)
        assert set(expected) <= set(actual)
        for step in expected:
            assert actual[step][name] == pytest.approx(expected[step][name], abs=1e-6)
