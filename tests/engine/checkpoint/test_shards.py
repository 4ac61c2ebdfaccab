"""Files of tensors: content, sizes and errors."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.engine.checkpoint.test_one_rank import files_of_at_most
from zerotrial.engine.checkpoint import shards
from zerotrial.engine.checkpoint.files import CheckpointError, hash_file
from zerotrial.engine.checkpoint.shards import write_tensors


def test_library_reads_every_type_and_shape(tmp_path: Path) -> None:
    tensors = {
        f"{dtype} é\n": torch.arange(1, 7).to(dtype).view(2, 3)
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
            torch.int16, torch.int8, torch.uint8, torch.bool,
            torch.float8_e4m3fn, torch.float8_e5m2,
        )
    }  # fmt: skip
    tensors |= {"one": torch.tensor(3.5), "none": torch.empty(0, 4), "cut": torch.ones(4, 4)[:, 1]}
    records = write_tensors(tmp_path, "all", tensors.items())
    assert list(records) == ["all-000.safetensors"]
    path = tmp_path / "all-000.safetensors"
    assert hash_file(path) == records[path.name]
    read = safetensors.torch.load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name].double(), tensor.double())


def test_type_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"w: must have a type of .*got torch.complex128"):
        write_tensors(tmp_path, "all", [("w", torch.ones(1, dtype=torch.complex128))])


def test_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_FILE_BYTES", 100)
    tensors = [(f"{number}", torch.full((20,), number)) for number in range(30)]
    records = write_tensors(tmp_path, "rank", iter(tensors))
    assert list(records) == [f"rank-{number:03}.safetensors" for number in range(30)]
    read = shards.read_tensors(tmp_path / name for name in records)
    assert all(torch.equal(read[name], value) for name, value in tensors)
    with files_of_at_most(50), pytest.raises(CheckpointError, match=r"could not write .* bytes"):
        write_tensors(tmp_path, "full", remaining := iter(tensors))
    assert len(list(remaining)) > 20  # it stops after the first errors
