"""Resume: a killed and resumed trial equals an uninterrupted one bit for bit."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zerotrial
from tests.engine.ranks import run_on_ranks
from tests.trial.helpers import (
    LineTrial,
    fit,
    last_checkpoint,
    make_settings,
    make_spec,
    metrics,
    records,
)
from zerolab.contract.spec import CheckpointRef, RunSpec
from zerolab.storage.store import CheckpointStore
from zerotrial import Batch
from zerotrial.ranks import Distributed

BATCHES = 13


class Killed(BaseException):
    """Exception in place of SIGKILL, which no code handles."""


class KilledTrial(LineTrial):
    """Trial that dies at micro-batch ``hparams["kill_at"]``, counted in this run."""

    def __init__(self, context):
        super().__init__(context)
        self.last_three = context.wrap_reducer(lambda values: sum(values[-3:]), name="last_three")

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        self.last_three.update(batch_idx)
        if len(self.seen) == self.context.get_hparams().get("kill_at"):
            raise Killed
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


@dataclass
class Case:
    """Settings of a trial, and the micro-batches (counted in each run) at which its runs die."""

    accumulation: int = 1
    samples: int = 22
    report: int = 1
    validate: int | None = None
    checkpoint: int = 3
    kills: tuple[int, ...] = ()
    stage: int | None = None
    background: bool = False
    bf16: bool = False

    def hparams(self, kill_at: int | None) -> dict[str, Any]:
        result: dict[str, Any] = {
            "accumulation": self.accumulation,
            "samples": self.samples,
            "kill_at": kill_at,
            "bf16": self.bf16,
            "background": self.background,
        }
        return result if self.stage is None else result | {"stage": self.stage}

    def settings(self) -> Any:
        return make_settings(
            BATCHES,
            report_period=Batch(self.report),
            validation_period=Batch(self.validate) if self.validate else None,
            checkpoint_period=Batch(self.checkpoint),
        )


def run(path: Path, case: Case, kill_at: int | None, distributed: Distributed | None) -> Any:
    """Run the trial in ``path`` and save its samples; return the trial, or None if it died."""
    distributed = distributed or Distributed()
    chief = distributed.broadcast(
        last_checkpoint(path) if (path / "metrics.jsonl").exists() else None
    )
    spec: RunSpec = make_spec(path, case.hparams(kill_at), chief)
    trials: list[KilledTrial] = []

    def make(context):
        trials.append(KilledTrial(context))
        return trials[0]

    seen = path / f"seen_{distributed.rank}.pt"
    previous = torch.load(seen) if seen.exists() else []
    start = chief.steps_completed * case.accumulation if chief else 0
    try:
        fit(spec, make, case.settings(), distributed)
        result = trials[0]
    except Killed:
        result = None
    torch.save(previous[:start] + trials[0].seen, seen)
    distributed.barrier()
    return result


def outcome(path: Path, trial: Any, rank: int = 0) -> dict[str, Any]:
    weights = {name: tensor.clone() for name, tensor in trial.engine.module.state_dict().items()}
    return {
        "weights": weights,
        "training": metrics(path, "training"),
        "validation": metrics(path, "validation"),
        "samples": torch.load(path / f"seen_{rank}.pt"),
    }


def check(path: Path, case: Case, distributed: Distributed | None = None) -> None:
    rank = distributed.rank if distributed else 0
    plain, killed = path / "plain", path / "mortal"
    expected = outcome(plain, run(plain, case, None, distributed), rank)
    for kill_at in case.kills:
        run(killed, case, kill_at, distributed)
    trial = run(killed, case, None, distributed)
    result = outcome(killed, trial, rank)
    for name, tensor in expected.pop("weights").items():
        assert torch.equal(result["weights"][name], tensor), (case, name)
    del result["weights"]
    assert result == expected, case


cases = st.builds(
    Case,
    accumulation=st.sampled_from([1, 4]),
    samples=st.sampled_from([8, 22, 23]),
    report=st.sampled_from([1, 5]),
    validate=st.sampled_from([None, 2, 5]),
    checkpoint=st.integers(1, 6),
    kills=st.lists(st.integers(0, 4 * BATCHES), min_size=1, max_size=3).map(tuple),
)


@pytest.mark.slow
@given(cases)
@settings(max_examples=15)
def test_resume_after_kill_is_bitwise_equal(case: Case) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        check(Path(directory), case)


@pytest.mark.parametrize(
    ("stage", "bf16", "background"), [(0, False, False), (1, True, True), (2, False, False)]
)
def test_resume_within_accumulation_is_bitwise_equal(
    tmp_path: Path, stage: int, bf16: bool, background: bool
) -> None:
    kills = (17, 0, 9)
    check(tmp_path, Case(4, 23, 5, 4, 3, kills, stage=stage, bf16=bf16, background=background))


def test_background_checkpoint_is_reported_when_complete(
    tmp_path: Path,
) -> None:
    settings = make_settings(6, checkpoint_period=Batch(2))
    fit(make_spec(tmp_path, {"stage": 1, "background": True}), settings=settings)
    saved = records(tmp_path, "checkpoint")
    assert [checkpoint["steps_completed"] for checkpoint in saved] == [2, 4, 6]
    store = CheckpointStore(tmp_path / "checkpoints")
    for checkpoint in saved:
        assert store.describe(checkpoint["uuid"]).resources == checkpoint["resources"]
        assert any(name.startswith("model0/") for name in checkpoint["resources"])


def run_on_two_ranks(directory: str, drawn: list[Case]) -> dict[str, Any]:
    distributed = Distributed.from_environment(cuda=False)
    path = Path(directory)
    for number, case in enumerate(drawn):
        check(path / str(number), case, distributed)
    # Another world size: saved by one rank and resumed by two, and the reverse.
    root = path / "resized"
    wide = Case(accumulation=1, stage=1, checkpoint=4)
    spec = make_spec(root, wide.hparams(None) | {"micro": 2}, last_checkpoint(root))
    _, trial = fit(spec, settings=make_settings(9), distributed=distributed)
    samples = [
        [x for part in parts for x in part]
        for parts in zip(*distributed.allgather(trial.seen), strict=True)
    ]
    return {"samples": samples, "rank": distributed.rank}


@pytest.mark.processes
def test_resume_on_other_world_size_keeps_samples(tmp_path: Path) -> None:
    draw = random.Random(4)
    drawn = [
        Case(
            accumulation=draw.choice([1, 4]),
            samples=draw.choice([22, 23, 31]),
            report=draw.choice([1, 5]),
            validate=draw.choice([None, 5]),
            checkpoint=draw.randint(2, 5),
            kills=tuple(draw.randint(0, 2 * BATCHES) for _ in range(2)),
            stage=stage,
            background=stage == 2,
            bf16=stage == 1,
        )
        for stage in (None, 0, 1, 1, 2)
    ]
    # Micro-batches of 4 on one rank are the same batches as micro-batches of 2 on two ranks.
    hparams = {"micro": 4, "samples": 22, "stage": 1}
    _, uninterrupted = fit(make_spec(tmp_path / "whole", hparams), settings=make_settings(13))
    _, start = fit(make_spec(tmp_path / "resized", hparams), settings=make_settings(5))
    per_rank = run_on_ranks(run_on_two_ranks, 2, str(tmp_path), drawn)
    latest = last_checkpoint(tmp_path / "resized")
    assert latest is not None
    assert latest.steps_completed == 9
    spec = make_spec(tmp_path / "resized", hparams, latest)
    _, end = fit(spec, settings=make_settings(13))
    assert start.seen + per_rank[0]["samples"] + end.seen == uninterrupted.seen


def test_unreported_metrics_of_removed_ranks_are_kept() -> None:
    entries = [(1, {"loss": 1.0}), (1, {"loss": 3.0}), (2, {"loss": 5.0})]
    unreported = zerotrial.loop.metrics.UnreportedMetrics()
    unreported.restore(entries[:1])
    unreported.restore(entries[1:])
    assert unreported.entries() == [(1, {"loss": 2.0}), (2, {"loss": 5.0})]


def test_checkpoint_files_load_with_weights_only(
    tmp_path: Path,
) -> None:
    class Count(zerotrial.Callback):
        def __init__(self) -> None:
            self.batches = 0

        def on_training_workload_end(self, avg_metrics, batch_metrics) -> None:
            self.batches += len(batch_metrics)

        def state_dict(self):
            return {"batches": self.batches, "kept": torch.ones(2)}

        def load_state_dict(self, state_dict):
            self.batches = state_dict["batches"]

    class Trial(LineTrial):
        def build_callbacks(self):
            self.count = Count()
            return {"count": self.count}

    fit(make_spec(tmp_path), Trial, make_settings(4))
    ref = last_checkpoint(tmp_path)
    files = list((tmp_path / "checkpoints" / ref.uuid).rglob("*.pt"))
    assert {file.parent.name for file in files} >= {"trial", "user"}
    contents = {file.parent.name: torch.load(file, weights_only=True) for file in files}
    assert contents["user"]["callbacks"]["count"]["batches"] == 4
    assert "callbacks" not in contents["trial"]
    _, trial = fit(make_spec(tmp_path, latest=ref), Trial, make_settings(6))
    assert trial.count.batches == 6


def test_save_rejects_unloadable_callback_state(tmp_path: Path) -> None:
    class UnloadableCallback(zerotrial.Callback):
        def state_dict(self):
            return {"path": tmp_path}

    class Trial(LineTrial):
        def build_callbacks(self):
            return {"bad": UnloadableCallback()}

    with pytest.raises(
        zerotrial.loop.checkpoints.TrialError, match="callback 'bad': state_dict must"
    ):
        fit(make_spec(tmp_path), Trial, make_settings(2))
    assert not list((tmp_path / "checkpoints").iterdir())


def test_damaged_checkpoint_names_the_file(tmp_path: Path) -> None:
    fit(make_spec(tmp_path), settings=make_settings(2))
    ref = last_checkpoint(tmp_path)
    file = tmp_path / "checkpoints" / ref.uuid / "trial" / "rank_0.pt"
    content = file.read_bytes()
    file.write_bytes(bytes(len(content)))
    with pytest.raises(zerotrial.loop.checkpoints.TrialError, match=r"rank_0\.pt is damaged"):
        fit(make_spec(tmp_path, latest=ref), settings=make_settings(4))
    file.unlink()
    with pytest.raises(LookupError, match=r"rank_0\.pt is missing"):
        fit(make_spec(tmp_path, latest=ref), settings=make_settings(4))


def test_checkpoint_of_other_trial_is_a_warm_start(tmp_path: Path) -> None:
    fit(make_spec(tmp_path / "old", {"stage": 1}), settings=make_settings(5))
    ref = last_checkpoint(tmp_path / "old")
    store = str(tmp_path / "old" / "checkpoints")
    spec = make_spec(tmp_path / "new", {"stage": 1}, ref, trial_id=2, checkpoint_dir=store)
    _, trial = fit(spec, settings=make_settings(3, initial_validation=True))
    assert sorted(metrics(tmp_path / "new", "training")) == [1, 2, 3]
    assert trial.engine.global_steps == 3
    old, new = (metrics(tmp_path / name, "validation") for name in ("old", "new"))
    assert new[0]["validation_loss"] == pytest.approx(old[5]["validation_loss"])


def test_unfinished_checkpoint_is_removed(tmp_path: Path) -> None:
    fit(make_spec(tmp_path), settings=make_settings(1))
    partial = tmp_path / "checkpoints" / ".partial.trial-1.0123"
    partial.mkdir()
    fit(make_spec(tmp_path), settings=make_settings(1))
    assert not partial.exists()
    assert len(records(tmp_path, "checkpoint")) == 2


class WarmTrial(LineTrial):
    """Trial that records the weights that it loads."""

    def load(self, context, path):
        super().load(context, path)
        module = self.engine.module
        self.loaded = {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_warm_start_loads_only_weights(
    tmp_path: Path,
) -> None:
    source = make_spec(tmp_path / "source", {"stage": 1})
    _, trained = fit(source, LineTrial, make_settings(3))
    checkpoint = last_checkpoint(tmp_path / "source")
    assert checkpoint is not None
    # The trial id is the same; only warm_start in the reference marks another trial's checkpoint.
    ref = CheckpointRef(checkpoint.uuid, 0, root=source.checkpoint_dir, warm_start=True)
    _, warm = fit(make_spec(tmp_path / "warm", {"stage": 1}, ref), WarmTrial, make_settings(2))
    for name, tensor in trained.engine.module.state_dict().items():
        assert torch.equal(warm.loaded[name], tensor)
    assert sorted(metrics(tmp_path / "warm", "training")) == [1, 2]
    assert warm.engine.global_steps == 2
