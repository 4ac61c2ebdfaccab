"""axolotl's trainer and each of its engine files under a Trainer.

axolotl's trainer derives from transformers' and passes the files to it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.ranks import run_on_ranks
from tests.extensions.huggingface.test_trainer import (
    Rows,
    assert_alike,
    become_rank,
    forget_accelerate,
    make_model,
    train,
)
from tests.extensions.huggingface.test_trl import rows_of, trl
from tests.libraries import folder_with, sources_of
from zerotrial.extensions.deepspeed_api import install

__all__ = ["trl"]

pytestmark = [pytest.mark.processes, pytest.mark.slow]

VERSION = "axolotl==0.19.0"
PACKAGES = (
    VERSION,
    "trl==1.9.0",  # the version that it requires
    "numba==0.68.1",
    "llvmlite==0.50.0",
    "colorama==0.4.6",
    "addict==2.4.0",
)
"""Dependencies that its trainer imports."""

PRECISE = ("zero1", "zero1_torch_compile", "zero2", "zero2_torch_compile", "zero3")
"""They leave the precision to the Trainer."""
BRIEF: dict[str, Any] = {"max_steps": 2, "save_strategy": "no"}
HALF = ("zero3_bf16", "zero3_bf16_cpuoffload_all", "zero3_bf16_cpuoffload_params")


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources_of(tmp_path_factory, VERSION) / "deepspeed_configs"


@pytest.fixture(scope="session")
def axolotl(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_with(tmp_path_factory, PACKAGES, options=["--no-compile"])


def train_with_each_file(folder: str, root: str) -> list[list[str]]:
    become_rank()
    install()

    def course(name: str, *, bf16: bool) -> Any:
        file: Any = f"{folder}/{name}.json"  # the Trainer reads it
        history, trainer = train(f"{root}/{name}", file, bf16=bf16, **BRIEF)
        zero = json.loads(Path(file).read_text())["zero_optimization"]
        assert trainer.model_wrapped.zero_optimization_stage() == zero["stage"]
        trainer.model_wrapped.close()
        return history

    plain, _ = train(f"{root}/plain", None, **BRIEF)
    for name in PRECISE:
        assert_alike(course(name, bf16=False), plain, 2e-6)
    first, *remaining = (course(name, bf16=True) for name in HALF)
    assert_alike(losses(first), losses(plain), 2e-3)
    for other in remaining:
        assert_alike(other, first, 1e-6)  # where states lie changes nothing
    return [sorted(row) for row in plain]


def losses(history: Any) -> Any:
    return [{"loss": row["loss"]} for row in history if "loss" in row]


def test_each_file_matches_plain_torch_and_files_of_its_precision(
    files: Path, tmp_path: Path
) -> None:
    assert sorted(file.stem for file in files.glob("*.json")) == sorted([*PRECISE, *HALF])
    rows = [["grad_norm", "learning_rate", "loss"]] * 2 + [["eval_loss"]]
    assert run_on_ranks(train_with_each_file, 2, str(files), str(tmp_path)) == [rows] * 2


def train_with_axolotl_trainer(
    library: str, with_datasets: str, folder: str, root: str
) -> list[str]:
    """Its trainer has its own optimizer groups and its own schedule."""
    os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "HF_DATASETS_OFFLINE": "1"}
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1"}
    sys.path[:0] = [library, with_datasets]
    become_rank()
    install()
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.core.training_args import AxolotlTrainingArguments
    from datasets import Dataset

    data = [{name: value.tolist() for name, value in Rows()[index].items()} for index in range(16)]

    def course(name: str) -> list[dict[str, float]]:
        forget_accelerate()
        file = None if name == "plain" else f"{folder}/{name}.json"
        arguments = AxolotlTrainingArguments(
            output_dir=f"{root}/own-{name}",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            embedding_lr=1e-3,
            lr_scheduler_type="cosine",
            cosine_min_lr_ratio=0.5,
            max_steps=3,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            deepspeed=file,
            use_cpu=file is None,
            bf16=False,
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        dataset = Dataset.from_list(data)
        return rows_of(AxolotlTrainer(model=make_model(), args=arguments, train_dataset=dataset))

    expected = course("plain")
    assert expected[-1]["learning_rate"] > 2e-3, "its own schedule"
    for name in ("zero1", "zero3"):
        assert_alike(course(name), expected, 1e-6)
    return [sorted(row) for row in expected]


@pytest.mark.soak
def test_axolotl_trainer_matches_plain_torch(
    axolotl: str, trl: str, files: Path, tmp_path: Path
) -> None:
    actual = run_on_ranks(train_with_axolotl_trainer, 2, axolotl, trl, str(files), str(tmp_path))
    assert actual == [[["grad_norm", "learning_rate", "loss"]] * 3] * 2
