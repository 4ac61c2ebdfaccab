"""``predict_with_generate`` and ``group_by_length``, compared with the plain Trainer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.engine.ranks import run_on_ranks
from tests.extensions.huggingface.test_trainer import (
    FP32,
    KEPT,
    assert_alike,
    assert_plain,
    auto,
    become_rank,
    forget_accelerate,
)
from zerotrial.extensions.deepspeed_api import install
from zerotrial.extensions.deepspeed_api.save_hooks import is_sharded

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROWS = 24


class Pairs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Data set of lengths from 4 to 11 that records accesses."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= ROWS:
            raise IndexError(index)  # where an iteration ends
        self.asked.append(index)
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(2, 32, (4 + index % 8,), generator=generator)
        return {"input_ids": ids, "labels": ids[:6]}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([row["input_ids"] for row in rows], True),
        "labels": pad([row["labels"] for row in rows], True, -100),
    }


def make_model() -> Any:
    """Return a model that generates one token for some inputs and the maximum for others."""
    from transformers import T5Config, T5ForConditionalGeneration, set_seed

    set_seed(5)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": [*range(1, 32, 3)]}
    more = {"num_heads": 2, "dropout_rate": 0.0, "tie_word_embeddings": False}
    return T5ForConditionalGeneration(T5Config(**sizes, **ids, **more))


def make_trainer(folder: str, file: dict[str, Any] | None, rows: Pairs) -> Any:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    forget_accelerate()
    arguments = Seq2SeqTrainingArguments(
        folder,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        deepspeed=file,
        use_cpu=file is None,
        disable_tqdm=True,
        log_level="error",
        predict_with_generate=True,
        generation_max_length=6,
        train_sampling_strategy="group_by_length",
        seed=1,
    )
    return Seq2SeqTrainer(
        model=make_model(), args=arguments, train_dataset=rows, data_collator=collate
    )


def trained(folder: str, file: dict[str, Any] | None) -> tuple[Any, ...]:
    """The Trainer, its history, and the order of the samples."""
    rows = Pairs()
    trainer = make_trainer(folder, file, rows)
    trainer.train()
    history = [{k: row[k] for k in KEPT if k in row} for row in trainer.state.log_history]
    trained_on = rows.asked[rows.asked.index(ROWS - 1) + 1 :]  # all lengths are looked at first
    return trainer, [row for row in history if row], trained_on


def predicted(trainer: Any) -> tuple[Any, list[int]]:
    """Return predictions and the number of tokens of this rank's batches."""
    lengths: list[int] = []
    generate = trainer.model.generate

    def recorded(*args: Any, **kwargs: Any) -> Any:
        tokens = generate(*args, **kwargs)
        lengths.append(tokens.shape[1])
        return tokens

    trainer.model.generate = recorded
    return trainer.predict(Pairs()), lengths


def compare_with_plain(root: str) -> tuple[list[int], list[int]]:
    become_rank()
    install()
    trainer, plain, order = trained(f"{root}/plain", None)
    assert_plain(trainer)
    expected, lengths = predicted(trainer)
    for stage in (0, 1, 2, 3):
        trainer, actual, mine_order = trained(f"{root}/{stage}", auto(stage))
        reported, mine_lengths = predicted(trainer)
        assert mine_order == order
        assert_alike(actual, plain, FP32)
        assert reported.predictions.tolist() == expected.predictions.tolist()
        assert mine_lengths == lengths
        assert reported.metrics["test_loss"] == pytest.approx(
            expected.metrics["test_loss"], rel=FP32
        )
        # TRL's mixture of two models generates, but is no module.
        assert is_sharded(SimpleNamespace(model=trainer.model)) == (stage == 3)
        if stage == 3:
            check_one_rank(trainer.model)
        trainer.model_wrapped.close()
        trainer.model.encoder(torch.tensor([[3]]))  # a plain model again
    compare_encoder_decoders()
    return order, lengths


def make_decoder(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "llama":
        sizes |= {"intermediate_size": 32, "num_key_value_heads": 1}
    ids = {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": [*range(1, 32, 5)]}
    set_seed(5)
    config = AutoConfig.for_model(kind, vocab_size=32, initializer_range=0.5, **sizes, **ids)
    return AutoModelForCausalLM.from_config(config).eval()


def decoded(model: Any, beams: int) -> list[list[int]]:
    """Decode different inputs on each rank, with outputs of different lengths."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(2, 32, (2, 5), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0  # padded on the left
    options = {"num_beams": beams, "do_sample": False, "max_new_tokens": 6}
    return model.generate(ids, attention_mask=mask, **options).tolist()


def compare_encoder_decoders() -> None:
    """Decoders, with one beam and three, in fp32 and bf16, at every stage."""
    import deepspeed

    for kind in ("gpt2", "llama"):
        for bf16 in (False, True):
            plain = make_decoder(kind)
            if bf16:
                for parameter in plain.parameters():
                    parameter.data = parameter.data.bfloat16()
            expected = [decoded(plain, beams) for beams in (1, 3)]
            for stage in (0, 1, 2, 3):
                file = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": bf16}}
                file["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
                file["zero_optimization"] = {"stage": stage}
                model = make_decoder(kind)
                engine = deepspeed.initialize(model=model, config=file)[0]
                engine.eval()
                actual = [decoded(engine.module, beams) for beams in (1, 3)]
                assert actual == expected, (kind, bf16, stage)
                engine.close()


def check_one_rank(model: Any) -> None:
    """A part is called on its own; without gradients nothing stays gathered, with them the root."""
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        full = model(input_ids=ids, decoder_input_ids=ids).encoder_last_hidden_state
        torch.testing.assert_close(model.encoder(ids).last_hidden_state, full, rtol=0, atol=0)
    assert isinstance(model.shared.weight, DTensor)
    torch.testing.assert_close(model.encoder(ids).last_hidden_state, full)
    assert not isinstance(model.shared.weight, DTensor)


def test_generation_matches_the_plain_model_at_every_stage(
    tmp_path: Path,
) -> None:
    (order, lengths), (other_order, other_lengths) = run_on_ranks(
        compare_with_plain, 2, str(tmp_path)
    )
    requests = [*order[:2], *other_order[:2], *order[2:4]]  # together, from the longest on
    sizes = [4 + index % 8 for index in requests]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 11
    assert len(lengths) == len(other_lengths) == ROWS // 4
    assert any(actual != other for actual, other in zip(lengths, other_lengths, strict=True))
