"""Detection of training that cannot succeed: skipped steps and wrong batch sizes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import zerotrial
from tests.trial.helpers import Line, LineTrial, fit, make_settings, make_spec, metrics
from zerolab.errors import TrialError
from zerotrial.loop.stop_reason import StopReason


class NanTrial(LineTrial):
    """Its loss is NaN in the batches that ``is_nan`` names."""

    @staticmethod
    def is_nan(_batch: int) -> bool:
        return True

    def train_batch(self, dataloader_iter: Iterator[Any], epoch_idx: int, batch_idx: int) -> Any:
        x, y, _ = next(dataloader_iter)
        loss = (self.engine(x) - y).square().mean()
        if self.is_nan(batch_idx):
            loss = loss * torch.nan
        self.engine.backward(loss)
        self.engine.step()
        return loss


@pytest.mark.parametrize("stage", [0, 2])
def test_50_skipped_steps_in_a_row_fail_the_trial(tmp_path: Path, stage: int) -> None:
    class Trial(NanTrial):
        @staticmethod
        def is_nan(batch: int) -> bool:
            return batch >= 20

    reason = "every step of the last 50 batches was skipped.*learned since batch 20"
    with pytest.raises(TrialError, match=reason):
        fit(make_spec(tmp_path, {"stage": stage}), Trial, make_settings(1000))
    assert max(metrics(tmp_path, "training")) < 70


def test_occasional_skipped_steps_are_allowed(tmp_path: Path) -> None:
    class Trial(NanTrial):
        @staticmethod
        def is_nan(batch: int) -> bool:
            return batch % 50 != 49

    stop_reason, _ = fit(make_spec(tmp_path, {"stage": 0}), Trial, make_settings(120))
    assert stop_reason is StopReason.FINISHED


class SizedTrial(LineTrial):
    options: ClassVar[dict[str, Any]] = {}

    def build_training_data_loader(self) -> Any:
        return zerotrial.DataLoader(Line(self.samples), batch_size=4, **self.options)


def test_loader_batch_size_must_be_micro_batch_size(
    tmp_path: Path,
) -> None:
    with pytest.raises(TrialError, match=r"micro-batch size of the engine, 2 .*got 4; pass"):
        fit(make_spec(tmp_path), SizedTrial)
    assert not metrics(tmp_path, "training")


def test_any_batch_size_allows_other_sizes(tmp_path: Path) -> None:
    class Trial(SizedTrial):
        options: ClassVar[dict[str, Any]] = {"any_batch_size": True}

    _, trial = fit(make_spec(tmp_path), Trial, make_settings(1))
    assert len(trial.seen[0]) == 4


def test_batch_sampler_allows_other_sizes(tmp_path: Path) -> None:
    class Trial(LineTrial):
        def build_training_data_loader(self) -> Any:
            return zerotrial.DataLoader(Line(6), batch_sampler=[[0, 1, 2], [3, 4, 5]])

    _, trial = fit(make_spec(tmp_path), Trial, make_settings(1))
    assert len(trial.seen[0]) == 3
