"""TRL's trainers at stage 3, beside themselves without the engine, on a tiny random model."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.compat.test_trainer import assert_alike, auto, become_rank, forget_accelerate, make_model
from tests.engine.ranks import run_on_ranks
from zerotrial.compat.deepspeed import install

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None, reason="needs trl: the extra compat-test"
    ),
]

KEPT = ("loss", "grad_norm", "learning_rate", "rewards/margins")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXTS = [" ".join(LETTERS[(first + i) % 26] for i in range(8)) for first in range(16)]


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    made: Any = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def rows_of(trainer: Any) -> list[dict[str, float]]:
    trainer.train()
    history = trainer.state.log_history
    if trainer.is_deepspeed_enabled:
        trainer.model_wrapped.close()
    return [{k: row[k] for k in KEPT if k in row} for row in history if "loss" in row]


def both(folder: str, file: dict[str, Any] | None) -> list[list[dict[str, float]]]:
    """Supervised training, then preferences against a frozen model."""
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    forget_accelerate()
    common: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "max_length": 16,
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
    tokenizer = make_tokenizer()
    supervised = rows_of(
        SFTTrainer(
            model=make_model(),
            args=SFTConfig(**common),
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
            args=DPOConfig(**common),
            train_dataset=Dataset.from_dict(pairs),
            processing_class=tokenizer,
        )
    )
    return [supervised, preferred]


def beside_itself(root: str) -> int:
    become_rank()
    install()
    plain = both(f"{root}/plain", None)
    mine = both(f"{root}/3", auto(3))
    for found, wanted in zip(mine, plain, strict=True):
        assert_alike(found, wanted, 1e-5)
    return sum(map(len, mine))


def test_sft_and_dpo_with_a_frozen_model_get_at_stage_3_what_they_get_from_plain_torch(
    tmp_path: Path,
) -> None:
    assert run_on_ranks(beside_itself, 2, str(tmp_path)) == [4, 4]
