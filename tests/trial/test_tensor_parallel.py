"""A trial whose matrices are cut over ranks: stopped, resumed, and put together in one process."""

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
CUT = {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}


class CutTrial(LineTrial):
    """One hidden layer, halves of which are on two ranks."""

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


def train(path: Path, cut: dict[str, Any], end: int, ranks: Distributed | None = None) -> int:
    """Go on from the last checkpoint; return the micro-batch size."""
    latest = last_checkpoint(path) if (path / "metrics.jsonl").exists() else None
    _, trial = fit(make_spec(path, {"cut": cut}, latest), CutTrial, make_settings(end), ranks)
    size = trial.context.get_train_micro_batch_size_per_gpu()
    trial.engine.close()
    return int(size)


def train_cut(directory: str) -> list[int]:
    """On each of two ranks."""
    distributed = Distributed.from_environment(cuda=False)
    sizes = []
    for end in STOPS:
        distributed.allgather(None)  # before one writes, all have read
        sizes.append(train(Path(directory), CUT, end, distributed))
    return sizes


def test_a_trial_of_cut_matrices_stopped_and_resumed_trains_as_one_process(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(whole, {}, BATCHES) == 4  # both ranks have one model, and so the same batches
    assert run_on_ranks(train_cut, 2, str(cut)) == [[4, 4]] * 2
    train(cut, {}, BATCHES)
    for group, name in (("training", "loss"), ("validation", "validation_loss")):
        expected, got = metrics(whole, group), metrics(cut, group)
        assert set(expected) <= set(got)
        for step in expected:
            assert got[step][name] == pytest.approx(expected[step][name], abs=1e-6)
