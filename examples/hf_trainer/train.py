"""A tiny GPT-2 on the source of Python's standard library: a script for DeepSpeed, unchanged."""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

CONTEXT = 128  # bytes that the model sees at once


class Source(Dataset[dict[str, torch.Tensor]]):
    """Windows of bytes of the standard library's modules, in the order of their names."""

    def __init__(self, first: int, count: int) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        taken = bytearray(text[first * CONTEXT : (first + count) * CONTEXT])
        self.windows = torch.frombuffer(taken, dtype=torch.uint8).view(count, CONTEXT)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.windows[index].long()
        return {"input_ids": window, "labels": window}


def main() -> None:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(arguments.seed)
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Source(0, 8000),
        eval_dataset=Source(8000, 64),
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    main()
