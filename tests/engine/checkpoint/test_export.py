"""Weights for use elsewhere: one safetensors file from any stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.engine.checkpoint.test_one_rank import files_of_at_most
from tests.engine.checkpointing import Net, make_engine, probe, train
from tests.engine.ranks import run_on_ranks
from zerolab.errors import ConfigError, ZerolabError
from zerotrial.engine.checkpoint.files import CheckpointError


def loss_of_file(path: Path) -> float:
    model = Net()
    model.load_state_dict(load_file(path))
    model.eval()
    return float(model(torch.randn(5, 6, generator=torch.Generator().manual_seed(7))).detach())


def export_at_every_stage(directory: str) -> list[Any]:
    results: list[Any] = []
    for stage in range(4):
        engine = make_engine(stage)
        train(engine, 2)
        path = engine.export(f"{directory}/{stage}/model.safetensors")
        results.append([path, probe(engine)])
        if stage == 3:
            try:
                engine.save_16bit_model(directory)
            except ZerolabError as error:
                results.append(str(error))
        engine.close()
    allowed = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = make_engine(3, zero=allowed, bf16={"enabled": True})
    train(engine, 2)
    results.append(engine.save_16bit_model(directory, "half.safetensors"))
    engine.close()
    dist.barrier()
    return results


@pytest.mark.processes
def test_export_of_every_stage_gives_equal_losses(tmp_path: Path) -> None:
    *stages, refused, done = run_on_ranks(export_at_every_stage, 2, str(tmp_path))[0]
    for path, loss in stages:
        assert loss_of_file(path) == pytest.approx(loss, rel=1e-6)
    assert "stage3_gather_16bit_weights_on_model_save: must be true" in refused
    assert done is True
    half = load_file(tmp_path / "half.safetensors")
    assert half["blocks.0.weight"].dtype == torch.bfloat16
    assert half["frozen"].dtype == torch.bfloat16
    assert half["calls"].dtype == torch.int64
    assert sorted(half) == sorted(Net().state_dict())


def test_export_in_requested_type(tmp_path: Path) -> None:
    engine = make_engine(0, bf16={"enabled": True})
    train(engine, 2)
    engine.export(tmp_path / "full.safetensors")
    engine.export(tmp_path / "half.safetensors", torch.float16, exclude_frozen_parameters=True)
    full, half = load_file(tmp_path / "full.safetensors"), load_file(tmp_path / "half.safetensors")
    assert full["first.weight"].dtype == torch.float32
    assert torch.equal(half["first.weight"], full["first.weight"].half())
    assert set(full) - set(half) == {"frozen"}
    assert torch.equal(full["tied.weight"], full["head.weight"])
    engine.save_16bit_model(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["first.weight"], full["first.weight"].bfloat16())
    with pytest.raises(ConfigError, match=r"must end in \.safetensors, got 'pytorch_model\.bin'"):
        engine.save_16bit_model(tmp_path, "pytorch_model.bin")


def test_failed_export_keeps_the_old_file(tmp_path: Path) -> None:
    engine = make_engine(0)
    path = tmp_path / "model.safetensors"
    engine.export(path)
    before = path.read_bytes()
    train(engine, 1)
    full = r"model\.safetensors: could not write [\d,]+ bytes"
    with files_of_at_most(1000), pytest.raises(CheckpointError, match=full):
        engine.export(path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["model.safetensors"]
