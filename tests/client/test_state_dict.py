"""State dicts of checkpoints that engines or scripts saved."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zerotrial
from zerolab.errors import ConfigError
from zerotrial.extensions.full_weights.state_dict import load_state_dict


def test_engine_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    engine, *_ = zerotrial.initialize(model=model, config=config)
    engine.save_checkpoint(str(tmp_path), tag="first")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = load_state_dict(tmp_path)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("name", ["model.safetensors", "state/model.pt", "model.bin"])
def test_single_file(tmp_path: Path, name: str) -> None:
    weights = {"weight": torch.arange(4.0)}
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    (tmp_path / "checkpoint.json").write_text("{}")
    (save_file if path.suffix == ".safetensors" else torch.save)(weights, path)
    torch.testing.assert_close(load_state_dict(tmp_path), weights)


def test_ambiguous_files_are_listed(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save({}, tmp_path / name)
    with pytest.raises(ConfigError, match=r"got a.pt, b.pt; use download\(\)"):
        load_state_dict(tmp_path)


def test_pickled_code_does_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "ran",)  # type: ignore[return-value]

    torch.save({"weight": Evil()}, tmp_path / "model.pt")
    with pytest.raises(ConfigError, match=r"model.pt: must contain tensors only"):
        load_state_dict(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_other_content(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.zeros(1)}}, tmp_path / "model.pt")
    with pytest.raises(ConfigError, match=r"model.pt: must be a state dict"):
        load_state_dict(tmp_path)
