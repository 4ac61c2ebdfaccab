"""Saving and loading on one rank: content, refused input, and results of faults."""

import json
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.checkpointing import Net, all_states, make_engine, probe, train
from zerolab.errors import NotFoundError, ZerolabError
from zerotrial.engine import initialize
from zerotrial.engine.checkpoint.files import CheckpointError, CheckpointNotFoundError, Manifest

STAGE = 2


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Directory with one checkpoint, of step 2."""
    engine = make_engine(STAGE)
    train(engine, 2)
    engine.save_checkpoint(tmp_path / "run", client_state={"epoch": 3, "order": torch.arange(4)})
    engine.close()
    return tmp_path / "run"


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let writes beyond ``size`` bytes fail, as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files_of(checkpoint: Path) -> list[str]:
    return sorted(path.name for path in checkpoint.iterdir())


def test_checkpoint_is_a_folder_of_plain_files(saved: Path) -> None:
    assert (saved / "latest").read_text() == "global_step2\n"
    assert files_of(saved) == ["global_step2", "latest"]
    assert files_of(saved / "global_step2") == [
        "client_state.pt",
        "manifest.json",
        "module-000.safetensors",
        "rank-00000-000.safetensors",
        "rank-00000.pt",
        "state.pt",
    ]
    manifest = json.loads((saved / "global_step2" / "manifest.json").read_text())
    assert manifest["stage"] == STAGE
    assert manifest["shapes"]["blocks.1.weight"] == [17, 17]
    for name, record in manifest["files"].items():
        assert (saved / "global_step2" / name).stat().st_size == record["size"]


def test_restart_in_another_process_is_bitwise_equal(tmp_path: Path) -> None:
    config = {
        "dropout": 0.3,
        "fp16": {"enabled": True, "initial_scale_power": 30, "loss_scale_window": 2},
        "gradient_accumulation_steps": 2,
    }
    engine = make_engine(STAGE, **config)
    losses = train(engine, 4)
    assert engine.skipped_steps > 0
    random.seed(5)
    np.random.seed(6)
    engine.save_checkpoint(tmp_path)
    expected = (train(engine, 6), random.random(), np.random.rand(), engine.loss_scale)
    expected_states = all_states(engine)
    engine.close()

    again = make_engine(STAGE, seed=9, **config)
    again.load_checkpoint(tmp_path)
    actual = (train(again, 6), random.random(), np.random.rand(), again.loss_scale)
    assert actual == expected
    assert again.get_lr() == engine.get_lr()
    assert again.progress.counters() == engine.progress.counters()
    assert losses != actual[0][:4]
    for key, state in all_states(again).items():
        assert torch.equal(state, expected_states[key]), key
    again.close()


def test_buffers_frozen_parameters_and_extra_state(tmp_path: Path) -> None:
    engine = make_engine(1)
    train(engine, 2)
    with torch.no_grad():
        engine.module.frozen.mul_(2.0)
    engine.module.scratch.fill_(7.0)
    engine.save_checkpoint(tmp_path)
    again = make_engine(1, seed=4)
    again.load_checkpoint(tmp_path)
    assert int(again.module.calls) == 2
    assert torch.equal(again.module.frozen, engine.module.frozen)
    assert again.module.scratch.tolist() == [0.0, 0.0, 0.0]  # not persistent
    engine.close()
    again.close()


def test_client_state_is_separate(saved: Path) -> None:
    engine = make_engine(STAGE)
    train(engine, 3)
    weights = all_states(engine)
    client_state = {"module": {"first.weight": 0}, "optimizer": None, "global_steps": -1}
    path = engine.save_checkpoint(saved, tag="mine", client_state=client_state)
    again = make_engine(STAGE, seed=2)
    assert again.load_checkpoint(saved, tag="mine") == (path, client_state)
    assert again.global_steps == 3
    for key, state in all_states(again).items():
        assert torch.equal(state, weights[key])
    _, client = again.load_checkpoint(saved, tag="global_step2")
    assert client["epoch"] == 3
    assert client["order"].tolist() == [0, 1, 2, 3]
    plain = torch.load(saved / "mine" / "client_state.pt", weights_only=True)
    assert plain == client_state


def test_unsafe_client_state_is_refused_by_name(tmp_path: Path) -> None:
    engine = make_engine(STAGE)
    with pytest.raises(CheckpointError, match=r"client_state.*'where' \(PosixPath\)"):
        engine.save_checkpoint(tmp_path / "run", client_state={"fine": 1, "where": tmp_path})
    round_itself: list[Any] = [1, tmp_path]
    round_itself.append(round_itself)
    deep = {"fine": 1, "loops": {"fit": [{"best": 1.0, 2: tmp_path}], "again": round_itself}}
    pattern = r": 'loops'\['fit'\]\[0\]\[2\] \(PosixPath\), 'loops'\['again'\]\[1\] \(PosixPath\)$"
    with pytest.raises(CheckpointError, match=pattern):
        engine.save_checkpoint(tmp_path / "run", client_state=deep)
    with pytest.raises(CheckpointError, match=r": 'key' \(dict\)$"):  # in no value of it
        engine.save_checkpoint(tmp_path / "run", client_state={"key": {tmp_path: 1}})
    assert not (tmp_path / "run" / "latest").exists()


def test_missing_checkpoint_is_an_error(saved: Path, tmp_path: Path) -> None:
    engine = make_engine(STAGE)
    before = probe(engine)
    with pytest.raises(CheckpointNotFoundError, match="nowhere: no such directory"):
        engine.load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match=r"no such checkpoint.*there are: global_step2, latest"):
        engine.load_checkpoint(saved, tag="global_step7")
    (saved / "latest").unlink()
    with pytest.raises(CheckpointNotFoundError, match="latest: missing"):
        engine.load_checkpoint(saved)
    assert probe(engine) == before
    assert engine.global_steps == 0


def test_truncated_latest_file_is_an_error(saved: Path) -> None:
    engine = make_engine(STAGE)
    train(engine, 1)
    engine.save_checkpoint(saved, tag="global_step25")
    for size in range(len("global_step25\n")):
        (saved / "latest").write_text("global_step25\n"[:size])
        with pytest.raises(CheckpointError, match="latest: damaged"):
            engine.load_checkpoint(saved)


def test_damaged_or_missing_file_changes_nothing(saved: Path) -> None:
    engine = make_engine(STAGE, seed=8)
    train(engine, 1)
    before, states = probe(engine), all_states(engine)
    checkpoint = saved / "global_step2"
    names = files_of(checkpoint)
    for name in names:
        path = checkpoint / name
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{name}: missing"):
            engine.load_checkpoint(saved)
        for size in (0, 1, len(content) // 2, len(content) - 2):
            path.write_bytes(content[:size])
            with pytest.raises(CheckpointError, match=f"{name}: .*damaged"):
                engine.load_checkpoint(saved)
        for at in (0, len(content) // 3, len(content) - 5):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(CheckpointError, match=f"{name}: .*damaged"):
                engine.load_checkpoint(saved)
        path.write_bytes(content)
    assert probe(engine) == before
    assert engine.global_steps == 1
    for key, state in all_states(engine).items():
        assert torch.equal(state, states[key])
    engine.load_checkpoint(saved)
    assert engine.global_steps == 2


@pytest.mark.parametrize("in_background", [False, True])
def test_full_disk_leaves_the_last_checkpoint(saved: Path, in_background: bool) -> None:
    engine = make_engine(STAGE)
    engine.load_checkpoint(saved)
    train(engine, 1)

    def save() -> None:
        engine.save_checkpoint(saved, async_save=in_background)
        engine.wait_for_checkpoint()

    full = r"safetensors: could not write [\d,]+ bytes"
    with files_of_at_most(5000), pytest.raises(CheckpointError, match=full):
        save()
    assert files_of(saved) == ["global_step2", "latest"]
    engine.save_checkpoint(saved)  # once there is room again
    assert (saved / "latest").read_text() == "global_step3\n"


def test_asynchronous_save_has_the_state_of_its_start(tmp_path: Path) -> None:
    engine = make_engine(STAGE, checkpoint={"writer": {"decoupled": True}})
    train(engine, 2)
    states, loss = all_states(engine), probe(engine)
    engine.save_checkpoint(tmp_path)
    train(engine, 3)
    engine.wait_for_checkpoint()
    again = make_engine(STAGE, seed=3)
    again.load_checkpoint(tmp_path)
    assert probe(again) == loss
    for key, state in all_states(again).items():
        assert torch.equal(state, states[key])


def test_save_waits_for_the_previous_one(tmp_path: Path) -> None:
    engine = make_engine(STAGE)
    train(engine, 1)
    for tag in ("a", "b", "c"):
        engine.save_checkpoint(tmp_path, tag=tag, async_save=True)
    engine.wait_for_checkpoint()
    assert files_of(tmp_path) == ["a", "b", "c", "latest"]
    assert (tmp_path / "latest").read_text() == "c\n"
    with files_of_at_most(100):
        engine.save_checkpoint(tmp_path, tag="d", async_save=True)
        with pytest.raises(CheckpointError, match="could not write"):
            engine.save_checkpoint(tmp_path, tag="e")
    engine.save_checkpoint(tmp_path, tag="e")
    assert (tmp_path / "latest").read_text() == "e\n"


def test_selection_limits_the_load(saved: Path) -> None:
    fresh = make_engine(STAGE, seed=5)
    moments = [key for key in all_states_of(saved) if "exp_avg" in key]
    assert moments

    weights_only = make_engine(STAGE, seed=5)
    weights_only.load_checkpoint(saved, load_module_only=True)
    assert weights_only.progress.counters() == fresh.progress.counters()
    assert weights_only.get_lr() == fresh.get_lr()
    assert not any("exp_avg" in key for key in all_states(weights_only))

    no_states = make_engine(STAGE, seed=5)
    no_states.load_checkpoint(saved, load_optimizer_states=False)
    assert no_states.global_steps == 2
    assert not any("exp_avg" in key for key in all_states(no_states))

    no_schedule = make_engine(STAGE, seed=5)
    no_schedule.load_checkpoint(saved, load_lr_scheduler_states=False)
    assert no_schedule.lr_scheduler.state_dict() == fresh.lr_scheduler.state_dict()
    everything = make_engine(STAGE, seed=5)
    everything.load_checkpoint(saved)
    assert everything.lr_scheduler.state_dict() != fresh.lr_scheduler.state_dict()
    assert probe(weights_only) == probe(no_states) == probe(everything) == probe(no_schedule)


def all_states_of(saved: Path) -> dict[str, torch.Tensor]:
    engine = make_engine(STAGE)
    engine.load_checkpoint(saved)
    return all_states(engine)


def test_another_optimizer_or_model_is_refused(saved: Path) -> None:
    sgd = make_engine(
        STAGE, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, scheduler=None
    )
    with pytest.raises(
        CheckpointError,
        match="keeps momentum_buffer, the checkpoint has exp_avg, exp_avg_sq; load_optimizer",
    ):
        sgd.load_checkpoint(saved)
    sgd.load_checkpoint(saved, load_optimizer_states=False)
    assert sgd.global_steps == 2

    other = initialize(
        model=nn.Sequential(nn.Linear(6, 6)),
        config={"train_batch_size": 8, "optimizer": {"type": "AdamW"}},
    )[0]
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: 0\.bias, 0\.weight"):
        other.load_checkpoint(saved)


def test_checkpoint_before_first_step_resets_optimizer(tmp_path: Path) -> None:
    for optimizer in (
        {"type": "AdamW", "params": {"lr": 0.01}},
        {"type": "Adagrad", "params": {"lr": 0.01, "initial_accumulator_value": 0.1}},
        {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}},
    ):
        engine = make_engine(STAGE, optimizer=optimizer)
        path = tmp_path / optimizer["type"]
        engine.save_checkpoint(path)
        expected = train(engine, 4)
        engine.load_checkpoint(path)
        assert train(engine, 4) == expected


def test_window_of_another_length_starts_after_load(saved: Path) -> None:
    engine = make_engine(STAGE, gradient_accumulation_steps=4)
    engine.backward(engine(torch.ones(2, 6)))
    engine.step()
    engine.load_checkpoint(saved)
    assert engine.micro_steps == 8
    assert not engine.is_gradient_accumulation_boundary()
    train(engine, 1)
    assert engine.global_steps == 3


def test_tag_must_be_a_folder_name(tmp_path: Path) -> None:
    engine = make_engine(STAGE)
    for tag in ("", "a/b", "..", "latest", "x.tmp-host-1-00000000"):
        with pytest.raises(ZerolabError, match="tag: must be a folder name"):
            engine.save_checkpoint(tmp_path, tag=tag)


def test_tag_is_replaced_and_latest_is_optional(saved: Path) -> None:
    engine = make_engine(STAGE)
    train(engine, 1)
    engine.save_checkpoint(saved, tag="global_step2", client_state={"new": True})
    assert make_engine(STAGE).load_checkpoint(saved)[1] == {"new": True}
    engine.save_checkpoint(saved, tag="side", save_latest=False)
    assert (saved / "latest").read_text() == "global_step2\n"
    assert files_of(saved) == ["global_step2", "latest", "side"]


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    engine = make_engine(STAGE)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert Manifest.read(tmp_path / "global_step0").excluded == ["frozen"]
    again = make_engine(STAGE)
    with torch.no_grad():
        again.module.frozen.fill_(3.0)
    again.load_checkpoint(tmp_path)
    assert again.module.frozen.tolist() == [3.0] * 6


def engine_with(frozen: set[str], seed: int) -> Any:
    torch.manual_seed(seed)
    model = Net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": STAGE},
    }
    return initialize(model=model, config=config)[0]


@pytest.mark.parametrize("module_only", [False, True])
def test_parameters_frozen_between_save_and_load(tmp_path: Path, module_only: bool) -> None:
    engine = engine_with({"frozen"}, seed=0)
    train(engine, 2)
    engine.save_checkpoint(tmp_path / "free")
    states = all_states(engine)
    tuned = engine_with({"frozen", "first.weight", "blocks.0.bias"}, seed=1)
    tuned.load_checkpoint(tmp_path / "free", load_module_only=module_only)
    assert probe(tuned) == probe(engine)
    for key, state in all_states(tuned).items():
        assert torch.equal(state, states[key])
    train(tuned, 1)
    tuned.save_checkpoint(tmp_path / "tuned")

    again = engine_with({"frozen"}, seed=2)
    again.load_checkpoint(tmp_path / "tuned", load_module_only=module_only)
    assert probe(again) == probe(tuned)
    train(again, 1)


def test_different_names_are_an_error_by_default(saved: Path) -> None:
    engine = make_engine(STAGE)
    engine.module.register_buffer("extra", torch.ones(2))
    before = probe(engine)
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: extra \(load_module_strict"):
        engine.load_checkpoint(saved)
    assert probe(engine) == before
    engine.load_checkpoint(saved, load_module_strict=False)
    assert probe(engine) != before
    assert engine.module.extra.tolist() == [1.0, 1.0]


def test_all_mismatches_of_another_model_are_listed(saved: Path) -> None:
    model = Net()
    model.blocks[1] = nn.Linear(17, 5)
    model.extra = nn.Linear(2, 2)
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}
    with pytest.raises(CheckpointError) as raised:
        initialize(model=model, config=config)[0].load_checkpoint(saved)
    for part in (
        str(saved / "global_step2"),
        "not in the checkpoint: extra.bias, extra.weight",
        "optimizer: keeps momentum_buffer",
    ):
        assert part in str(raised.value)
    first = str(raised.value).splitlines()[0]
    assert "does not fit: shape mismatch for 2 of " in first
    assert " tensors: " in first
    assert "blocks.1.weight: shape must be [5, 17], got [17, 17]" in first
    assert "blocks.1.bias: shape must be [5], got [17]" in first


def test_mismatch_message_is_limited(tmp_path: Path) -> None:
    def engine_of(width: int, layers: int) -> Any:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        config = {"train_batch_size": 2, "optimizer": {"type": "SGD"}}
        return initialize(model=model, config=config)[0]

    engine_of(3, 16).save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        engine_of(4, 10).load_checkpoint(tmp_path)
    first, names = str(raised.value).splitlines()
    assert "does not fit: shape mismatch for 20 of 32 tensors: " in first
    assert "0.weight: shape must be [4, 4], got [3, 3]; " in first
    assert first.endswith("; and 17 more")
    assert "not in the model: 10.bias, 10.weight, 11.bias," in names
    assert ", and 4 more (load_module_strict=False" in names


def test_numeric_tag_and_empty_directory(tmp_path: Path) -> None:
    engine = make_engine(STAGE)
    engine.save_checkpoint(tmp_path, tag=7)
    assert engine.load_checkpoint(tmp_path, tag=7)[0].endswith("7")
    for invalid in ("", None):
        with pytest.raises(CheckpointError, match="save_dir: must be the name of a directory"):
            engine.save_checkpoint(invalid)
        with pytest.raises(CheckpointError, match="load_dir: must be the name of a directory"):
            engine.load_checkpoint(invalid)


@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
    ],
)
def test_fresh_optimizer_gets_rates_of_loaded_schedule(
    tmp_path: Path, scheduler: dict[str, Any]
) -> None:
    engine = make_engine(STAGE, scheduler=scheduler)
    train(engine, 3)
    engine.save_checkpoint(tmp_path)
    again = make_engine(STAGE, scheduler=scheduler)
    assert again.get_lr() != engine.get_lr()
    again.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert again.get_lr() == engine.get_lr()
