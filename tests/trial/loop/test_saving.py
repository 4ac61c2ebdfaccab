"""A trial's checkpoint is of all ranks or of none, whichever of them fails."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.ranks import run_on_ranks
from tests.trial.helpers import LineTrial, build, make_settings, make_spec
from zerotrial.callbacks import Callback
from zerotrial.ranks import Distributed

pytestmark = pytest.mark.processes


class Odd:
    def __reduce__(self) -> str:
        raise NotImplementedError  # without a word


class Unsaveable(Callback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"odd": Odd()} if self.rank == 1 else {}


class UnsaveableTrial(LineTrial):
    def build_callbacks(self) -> dict[str, Callback]:
        return {"unsaveable": Unsaveable(self.context.distributed.rank)}


def error_of(controller: Any, session: Any) -> str:
    try:
        controller.run()
    except Exception as error:  # noqa: BLE001 - what it is, is the answer
        return f"{type(error).__name__}: {error}"
    finally:
        session.close(None)
    return "none"


def fail_on_one(directory: str) -> list[str]:
    ranks = Distributed.from_environment(cuda=False)

    def start(name: str, trial: Any) -> tuple[Any, Any]:
        run_dir = Path(directory) / name / str(ranks.rank)
        spec = make_spec(Path(directory) / name, slots=2, run_dir=str(run_dir))
        run_dir.mkdir(exist_ok=True)
        return build(spec, trial, make_settings(2), ranks)

    found = [error_of(*start("unsaveable", UnsaveableTrial))]
    controller, session = start("stale", LineTrial)
    validate = controller._validator.run

    def taken_over_after_it() -> Any:
        metrics = validate()
        if session._reporter is not None:
            session._reporter.stale.set()
        return metrics

    controller._validator.run = taken_over_after_it
    found.append(error_of(controller, session))
    ranks.barrier()
    return found


def test_all_ranks_give_a_checkpoint_up_and_only_then_it_is_removed(tmp_path: Path) -> None:
    (zero, one) = run_on_ranks(fail_on_one, 2, str(tmp_path))
    assert one[0].startswith("TrialError: callback 'unsaveable'")
    assert "without running code: NotImplementedError" in one[0]
    assert zero[0].startswith("ZerolabError: checkpoint: not stored, because of rank 1: callback")
    assert (
        zero[1] == "StaleRunError: another run has taken this trial over; its checkpoint is dropped"
    )
    assert one[1].startswith(
        "StaleRunError: checkpoint: not stored, because of rank 0: another run"
    )
    for name in ("unsaveable", "stale"):
        assert list((tmp_path / name / "checkpoints").iterdir()) == []
