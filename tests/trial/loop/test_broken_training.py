"""A training that cannot come to anything ends, and says why."""

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
def test_a_trial_that_skips_50_steps_in_a_row_ends_with_that_reason(
    tmp_path: Path, stage: int
) -> None:
    class Trial(NanTrial):
        @staticmethod
        def is_nan(batch: int) -> bool:
            return batch >= 20

    reason = "every step of the last 50 batches was skipped.*learned since batch 20"
    with pytest.raises(TrialError, match=reason):
        fit(make_spec(tmp_path, {"stage": stage}), Trial, make_settings(1000))
    assert max(metrics(tmp_path, "training")) < 70


def test_steps_that_are_skipped_now_and_then_end_nothing(tmp_path: Path) -> None:
    class Trial(NanTrial):
        @staticmethod
        def is_nan(batch: int) -> bool:
            return batch % 50 != 49

    ending, _ = fit(make_spec(tmp_path, {"stage": 0}), Trial, make_settings(120))
    assert ending is StopReason.FINISHED


class SizedTrial(LineTrial):
    options: ClassVar[dict[str, Any]] = {}

    def build_training_data_loader(self) -> Any:
        return zerotrial.DataLoader(Line(self.samples), batch_size=4, **self.options)


def test_a_loader_whose_batch_is_no_micro_batch_is_refused_before_the_first_one(
    tmp_path: Path,
) -> None:
    with pytest.raises(TrialError, match=r"micro-batch size of the engine, 2 .*got 4; pass"):
        fit(make_spec(tmp_path), SizedTrial)
    assert not metrics(tmp_path, "training")


def test_another_batch_size_is_taken_when_it_is_meant(tmp_path: Path) -> None:
    class Trial(SizedTrial):
        options: ClassVar[dict[str, Any]] = {"any_batch_size": True}

    _, trial = fit(make_spec(tmp_path), Trial, make_settings(1))
    assert len(trial.seen[0]) == 4


def test_the_right_size_and_batches_of_ones_own_need_no_word(tmp_path: Path) -> None:
    class Trial(LineTrial):
        def build_training_data_loader(self) -> Any:
            return zerotrial.DataLoader(Line(6), batch_sampler=[[0, 1, 2], [3, 4, 5]])

    _, trial = fit(make_spec(tmp_path), Trial, make_settings(1))
    assert len(trial.seen[0]) == 3
