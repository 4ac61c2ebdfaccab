"""TRL's trainers with and without the engine, on a tiny random model."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.ranks import run_on_ranks
from tests.extensions.huggingface.test_trainer import (
    FP32,
    assert_alike,
    assert_plain,
    auto,
    become_rank,
    forget_accelerate,
    make_model,
)
from tests.libraries import folder_with
from zerotrial.extensions.deepspeed_api import install

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PACKAGES = (
    "trl==1.16.0",
    "datasets==5.2.0",
    "pyarrow==26.0.1",
    "pandas==3.1.1",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "xxhash==4.1.0",
)


@pytest.fixture(scope="session")
def trl(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_with(
        tmp_path_factory, PACKAGES, is_installed=lambda: importlib.util.find_spec("trl") is not None
    )


KEPT = ("loss", "grad_norm", "learning_rate", "rewards/margins")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXTS = [" ".join(LETTERS[(first + i) % 26] for i in range(8)) for first in range(16)]


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    built: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=built, **names)


def rows_of(trainer: Any) -> list[dict[str, float]]:
    trainer.train()
    history = trainer.state.log_history
    if trainer.args.deepspeed is None:
        assert_plain(trainer)
    else:
        trainer.model_wrapped.close()
    return [{k: row[k] for k in KEPT if k in row} for row in history if "loss" in row]


def common(folder: str, file: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "deepspeed": file,
        "use_cpu": file is None,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }


def both(folder: str, file: dict[str, Any] | None) -> list[list[dict[str, float]]]:
    """Supervised training, then preferences against a frozen model."""
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    forget_accelerate()
    tokenizer = make_tokenizer()
    supervised = rows_of(
        SFTTrainer(
            model=make_model(),
            args=SFTConfig(**common(folder, file), max_length=16),
            train_dataset=Dataset.from_dict({"text": TEXTS}),
            processing_class=tokenizer,
        )
    )
    forget_accelerate()
    pairs = {
        "prompt": [text[:6] for text in TEXTS],
        "chosen": [text[6:] for text in TEXTS],
        "rejected": [text[6:][::-1] for text in TEXTS],
    }
    preferred = rows_of(
        DPOTrainer(
            model=make_model(),
            ref_model=make_model(),
            args=DPOConfig(**common(folder, file), max_length=16),
            train_dataset=Dataset.from_dict(pairs),
            processing_class=tokenizer,
        )
    )
    return [supervised, preferred]


def generating(folder: str, file: dict[str, Any] | None) -> Any:
    """Train with rewards for the model's own generations, with a reference model that follows it.

    Returns:
        Logs, this rank's generations, and both models' weights on rank 0.
    """
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    forget_accelerate()
    written: list[str] = []

    def vowels(completions: list[str], **columns: Any) -> list[float]:
        written.extend(completions)
        return [float(sum(word in "aeiou" for word in text.split())) for text in completions]

    start = f"{folder}/start"  # the reference begins there, too
    if dist.get_rank() == 0:
        make_model().save_pretrained(start)
    dist.barrier()
    trainer = GRPOTrainer(
        model=start,
        reward_funcs=vowels,
        args=GRPOConfig(
            **common(folder, file),
            num_generations=2,
            max_completion_length=6,
            beta=0.1,
            sync_ref_model=True,
            ref_model_sync_steps=1,
            ref_model_mixup_alpha=0.5,
        ),
        train_dataset=Dataset.from_dict({"prompt": [text[:6] for text in TEXTS]}),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    keys = ("loss", "grad_norm", "reward", "reward_std", "kl", "completions/mean_length")
    history = trainer.state.log_history
    rows = [{key: row[key] for key in keys} for row in history if "loss" in row]
    models = (trainer.model_wrapped, trainer.ref_model)
    if file is None:
        assert_plain(trainer)
        weights = [trainer.accelerator.unwrap_model(model).state_dict() for model in models]
    else:
        weights = [model.full_state_dict() for model in models]
        models[0].close()
    return rows, written, weights


def compare_with_plain(library: str, root: str) -> int:
    sys.path.insert(0, library)
    become_rank()
    install()
    plain = both(f"{root}/plain", None)
    rows, written, weights = generating(f"{root}/generating", None)
    assert len(written) == 8
    for stage in (0, 3, 2):
        actual = both(f"{root}/{stage}", auto(stage))
        for measured, plain_value in zip(actual, plain, strict=True):
            assert_alike(measured, plain_value, FP32)
        measured, texts, models = generating(f"{root}/generating{stage}", auto(stage))
        assert texts == written
        assert_alike(measured, rows, FP32)
        for model, expected in zip(models, weights, strict=True):
            for name, value in model.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    return sum(map(len, actual))


def test_sft_dpo_and_grpo_match_plain_torch(trl: str, tmp_path: Path) -> None:
    assert run_on_ranks(compare_with_plain, 2, trl, str(tmp_path)) == [4, 4]
