"""LLaMA-Factory itself, from its arguments to its trainer, with engine files of its kinds."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.engine.ranks import run_on_ranks
from tests.extensions.huggingface.test_trainer import (
    assert_alike,
    become_rank,
    forget_accelerate,
    make_model,
)
from tests.extensions.huggingface.test_trl import TEXTS, make_tokenizer, trl
from tests.libraries import folder_with
from zerotrial.extensions.deepspeed_api import install

__all__ = ["trl"]

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PACKAGES = (
    "llamafactory==0.9.5",
    "trl==0.24.0",
    "torchaudio==2.11.0",
    "omegaconf==2.4.0",
    "antlr4-python3-runtime==4.9.3",
)
KINDS = Path(__file__).parents[1] / "deepspeed_config" / "public"
OFFLOAD = {"device": "cpu", "pin_memory": True}
KEPT = ("loss", "grad_norm", "learning_rate", "eval_loss")


def without_extension(folder: str) -> str:
    """Remove torchaudio's compiled extension, which needs CUDA."""
    for library in Path(folder, "torchaudio", "lib").glob("*.so"):
        library.unlink()
    return ""


@pytest.fixture(scope="session")
def factory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_with(tmp_path_factory, PACKAGES, without_extension)


def files() -> dict[str, dict[str, Any]]:
    """Return one engine file of each kind."""
    zero0 = json.loads((KINDS / "factory_zero0.json").read_text())
    zero3 = json.loads((KINDS / "factory_zero3.json").read_text())
    zero2 = {**zero0, "zero_optimization": {**zero0["zero_optimization"], "stage": 2}}

    def away(file: dict[str, Any], *what: str) -> dict[str, Any]:
        zero = file["zero_optimization"] | {f"offload_{name}": OFFLOAD for name in what}
        return {**file, "zero_optimization": zero}

    return {
        "zero0": zero0,
        "zero2": zero2,
        "zero3": zero3,
        "zero2_offload": away(zero2, "optimizer"),
        "zero3_offload": away(zero3, "optimizer", "param"),
    }


def write_data(root: Path) -> None:
    make_model().save_pretrained(root / "model")
    make_tokenizer().save_pretrained(root / "model")
    (root / "texts.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
    reported = {"texts": {"file_name": "texts.json", "columns": {"prompt": "text"}}}
    (root / "dataset_info.json").write_text(json.dumps(reported))


def history_of(root: Path, name: str, **more: Any) -> list[dict[str, float]]:
    """Return the log history of a run with LLaMA-Factory's own arguments."""
    from llamafactory.hparams import get_train_args
    from llamafactory.train.pt import run_pt

    forget_accelerate()
    arguments = {
        "stage": "pt",
        "do_train": True,
        "finetuning_type": "full",
        "disable_gradient_checkpointing": True,  # its own is not for this transformers
        "model_name_or_path": str(root / "model"),
        "dataset": "texts",
        "dataset_dir": str(root),
        "val_size": 4,
        "cutoff_len": 8,
        "output_dir": str(root / name),
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        **more,
    }
    model, data, training, finetuning, _ = get_train_args(arguments)
    run_pt(model, data, training, finetuning, [])
    dist.barrier()
    state = json.loads((root / name / "trainer_state.json").read_text())
    rows = [{key: row[key] for key in KEPT if key in row} for row in state["log_history"]]
    return [row for row in rows if row]


def train_with_every_kind(folder: str, with_datasets: str, address: str) -> list[str]:
    os.environ |= {"DISABLE_VERSION_CHECK": "1", "HF_DATASETS_OFFLINE": "1"}
    sys.path[:0] = [folder, with_datasets]
    become_rank()
    install()
    root = Path(address)
    os.environ["HF_HOME"] = str(root / f"home{dist.get_rank()}")
    if dist.get_rank() == 0:
        write_data(root)
    dist.barrier()
    expected = history_of(root, "plain", use_cpu=True)
    assert os.environ.get("ACCELERATE_USE_DEEPSPEED") is None, "torch alone"
    assert [sorted(row) for row in expected[-2:]] == [sorted(KEPT[:3]), ["eval_loss"]]
    done = []
    for name, file in files().items():
        path = root / f"{name}.{dist.get_rank()}.json"
        path.write_text(json.dumps(file))
        actual = history_of(root, name, deepspeed=str(path))
        assert_alike(actual, expected, 1e-5)
        done.append(name)
    return done


def test_each_kind_of_file_trains_like_plain_torch(factory: str, trl: str, tmp_path: Path) -> None:
    actual = run_on_ranks(train_with_every_kind, 2, factory, trl, str(tmp_path))
    assert actual == [list(files())] * 2
