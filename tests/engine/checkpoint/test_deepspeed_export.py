"""Our checkpoints become DeepSpeed's universal ones: what the files hold, and what is refused.

That DeepSpeed reads them and trains on: ``tests/trial/test_deepspeed.py``.
"""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.checkpointing import all_states, make_engine, train
from tests.engine.ranks import run_on_ranks
from zerotrial.engine.checkpoint.deepspeed.convert import export_deepspeed, import_deepspeed, main
from zerotrial.engine.checkpoint.files import CheckpointError


def save(place: str, stage: int) -> dict[str, torch.Tensor]:
    engine = make_engine(stage)
    train(engine, 3)
    engine.save_checkpoint(place, client_state={"mine": 5})
    return {**all_states(engine), **engine.full_state_dict()}


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)  # DeepSpeed's classes would be refused


@pytest.mark.parametrize("stage", [1, 3])
def test_each_weight_state_and_count_has_its_place(stage: int, tmp_path: Path) -> None:
    states, *_ = run_on_ranks(save, 2, str(tmp_path / "ours"), stage)
    path = Path(export_deepspeed(tmp_path / "ours", tmp_path / "theirs"))
    assert path == tmp_path / "theirs" / "global_step3"
    for latest in ("latest", "latest_universal"):
        assert (tmp_path / "theirs" / latest).read_text().strip() == "global_step3"
    names = {key.rpartition("/")[0] for key in states if key.endswith("/master")}
    assert names == {folder.name for folder in (path / "zero").iterdir() if folder.is_dir()}
    for name in names:
        for file, kind in (("fp32", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq",) * 2):
            found = load(path / "zero" / name / f"{file}.pt")["param"]
            assert found.shape == states[name].shape
            assert torch.equal(found.view(-1), states[f"{name}/{kind}"].view(-1))
        assert load(path / "zero" / name / "step.pt") == 3
    optimizer = load(path / "zero" / "optimizer_state.pt")
    assert optimizer["param_groups"][0]["weight_decay"] == 0.1
    model = load(path / "mp_rank_00_model_states.pt")
    assert (model["global_steps"], model["mine"]) == (3, 5)
    assert model["lr_scheduler"] == {"last_batch_iteration": 2}
    assert {"calls", "frozen", *names} == set(model["module"])
    assert torch.equal(model["module"]["frozen"], states["frozen"])
    other = load(path / "zero_pp_rank_0_mp_rank_00_model_states.pt")  # stage 3's, without weights
    assert set(other["module"]) == {"calls", "frozen"}


def test_what_deepspeed_has_no_place_for_is_told_all_at_once(tmp_path: Path) -> None:
    engine = make_engine(1, train_micro_batch_size_per_gpu=4)
    engine.backward(engine(torch.ones(4, 6)))
    engine.step()  # the first of two micro-batches
    engine.save_checkpoint(tmp_path, client_state={"module": 1}, exclude_frozen_parameters=True)
    with pytest.raises(CheckpointError) as caught:
        export_deepspeed(tmp_path, tmp_path / "theirs")
    told = str(caught.value).splitlines()[1:]
    assert [line.strip().partition(":")[0] for line in told] == [
        "gradients of an unfinished accumulation window",
        "frozen parameters",
        "client_state",
    ]
    assert not (tmp_path / "theirs").exists()


def test_the_command_converts_in_the_direction_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine(2)
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "ours")
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "ours"), str(tmp_path / "a"), "--export"])
    assert main() == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a" / "global_step1")
    with pytest.raises(CheckpointError, match=r"is one of Zerolab's own; export_deepspeed"):
        import_deepspeed(tmp_path / "ours", tmp_path / "b")
    damaged = next((tmp_path / "ours" / "global_step1").glob("rank-*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "ours"), str(tmp_path / "c"), "--export"])
    assert main() == 2
    assert f"{damaged}: damaged" in capsys.readouterr().err


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that is full: a write beyond it fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_export_that_fails_midway_leaves_what_was_there_before(tmp_path: Path) -> None:
    engine = make_engine(1)
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "ours")
    first = Path(export_deepspeed(tmp_path / "ours", tmp_path / "theirs"))
    before = {p: p.read_bytes() for p in sorted((tmp_path / "theirs").rglob("*")) if p.is_file()}
    assert first / "mp_rank_00_model_states.pt" in before
    size = (first / "zero" / "optimizer_state.pt").stat().st_size  # written after the weights
    with files_of_at_most(size - 1), pytest.raises(CheckpointError, match="could not be written"):
        export_deepspeed(tmp_path / "ours", tmp_path / "theirs")
    after = {p: p.read_bytes() for p in sorted((tmp_path / "theirs").rglob("*")) if p.is_file()}
    assert after == before
