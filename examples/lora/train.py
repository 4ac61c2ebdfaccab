"""LoRA through peft: adapters are trained, and the frozen model below them is sharded too."""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

PERIOD = 7  # each text counts on in steps of one, modulo this


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    """What is to be learned: 0 1 2 3 4 5 6 0 1 2 ..., from any number on."""
    rows = (torch.arange(32)[None] + torch.arange(count)[:, None]) % PERIOD
    return [{"input_ids": row, "labels": row} for (row,) in TensorDataset(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed", default="ds_config.json")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--local_rank", type=int, help="as launchers tell it")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    below = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    adapters = LoraConfig(r=8, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    model = get_peft_model(below, adapters)
    if int(arguments.local_rank or 0) == 0:
        model.print_trainable_parameters()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            arguments.output_dir,
            deepspeed=arguments.deepspeed,
            max_steps=arguments.steps,
            per_device_train_batch_size=8,
            learning_rate=2e-2,
            logging_steps=5,
            report_to=[],
        ),
        train_dataset=texts(256),
        eval_dataset=texts(16),
    )
    trainer.train()
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()  # the adapters alone


if __name__ == "__main__":
    main()
