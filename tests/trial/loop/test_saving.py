"""Atomicity of a trial's checkpoint if one rank fails to save."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.ranks import run_on_ranks
from tests.trial.helpers import LineTrial, build, make_settings, make_spec
from zerotrial.callbacks import Callback
from zerotrial.ranks import Distributed

pytestmark = pytest.mark.processes


class UnpicklableState:
    def __reduce__(self) -> str:
        raise NotImplementedError  # without a message


class Unsaveable(Callback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"odd": UnpicklableState()} if self.rank == 1 else {}


class UnsaveableTrial(LineTrial):
    def build_callbacks(self) -> dict[str, Callback]:
        return {"unsaveable": Unsaveable(self.context.distributed.rank)}


def error_of(controller: Any, session: Any) -> str:
    try:
        controller.run()
    except Exception as error:  # noqa: BLE001 - the test compares any error
        return f"{type(error).__name__}: {error}"
    finally:
        session.close(None)
    return "none"


def save_with_failing_rank(directory: str) -> list[str]:
    ranks = Distributed.from_environment(cuda=False)

    def start(name: str, trial: Any) -> tuple[Any, Any]:
        run_dir = Path(directory) / name / str(ranks.rank)
        spec = make_spec(Path(directory) / name, slots=2, run_dir=str(run_dir))
        run_dir.mkdir(exist_ok=True)
        return build(spec, trial, make_settings(2), ranks)

    errors = [error_of(*start("unsaveable", UnsaveableTrial))]
    controller, session = start("stale", LineTrial)
    validate = controller._validator.run

    def superseded_after_validation() -> Any:
        metrics = validate()
        if session._reporter is not None:
            session._reporter.stale.set()
        return metrics

    controller._validator.run = superseded_after_validation
    errors.append(error_of(controller, session))
    ranks.barrier()
    return errors


def test_failed_save_is_removed_on_all_ranks(tmp_path: Path) -> None:
    (rank_0, rank_1) = run_on_ranks(save_with_failing_rank, 2, str(tmp_path))
    assert rank_1[0].startswith("TrialError: callback 'unsaveable'")
    assert "without running code: NotImplementedError" in rank_1[0]
    assert rank_0[0].startswith("ZerolabError: checkpoint: not stored, because of rank 1: callback")
    assert (
        rank_0[1]
        == "StaleRunError: another run has taken over this trial; this checkpoint is dropped"
    )
    assert rank_1[1].startswith(
        "StaleRunError: checkpoint: not stored, because of rank 0: another run"
    )
    for name in ("unsaveable", "stale"):
        assert list((tmp_path / name / "checkpoints").iterdir()) == []
