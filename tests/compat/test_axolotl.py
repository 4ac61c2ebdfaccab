"""The engine files that come with axolotl, each under a Trainer, which axolotl hands them to."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compat.test_trainer import assert_alike, become_rank, train
from tests.engine.ranks import run_on_ranks
from tests.libraries import sources_of
from zerotrial.compat.deepspeed import install

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PRECISE = ("zero1", "zero1_torch_compile", "zero2", "zero2_torch_compile", "zero3")
"""They leave the precision to the Trainer."""
BRIEF: dict[str, Any] = {"max_steps": 2, "save_strategy": "no"}
HALF = ("zero3_bf16", "zero3_bf16_cpuoffload_all", "zero3_bf16_cpuoffload_params")


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources_of(tmp_path_factory, "axolotl==0.19.0") / "deepspeed_configs"


def with_each_file(folder: str, root: str) -> list[list[str]]:
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
    first, *others = (course(name, bf16=True) for name in HALF)
    assert_alike(losses(first), losses(plain), 2e-3)
    for other in others:
        assert_alike(other, first, 1e-6)  # where states lie changes nothing
    return [sorted(row) for row in plain]


def losses(history: Any) -> Any:
    return [{"loss": row["loss"]} for row in history if "loss" in row]


def test_each_file_trains_as_plain_torch_and_as_the_others_of_its_precision(
    files: Path, tmp_path: Path
) -> None:
    assert sorted(file.stem for file in files.glob("*.json")) == sorted([*PRECISE, *HALF])
    rows = [["grad_norm", "learning_rate", "loss"]] * 2 + [["eval_loss"]]
    assert run_on_ranks(with_each_file, 2, str(files), str(tmp_path)) == [rows] * 2
