"""ZeRO over the machines of a hostfile: every optimizer step the same samples, however many ranks.

It resumes from the latest checkpoint in `--checkpoints`, which all machines must see.
"""

import argparse
import os
import time
from pathlib import Path

import torch

import zerotrial

WIDTH = 64


def batch_of(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make an optimizer step's samples, (size, WIDTH) and (size, 1), from its number alone."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(size, WIDTH, generator=generator)
    return inputs, inputs[:, :8].sin().sum(dim=1, keepdim=True)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0, help="set by `zerolab launch`")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 128), torch.nn.GELU(), torch.nn.Linear(128, 1)
    )
    config = {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
    }
    engine, *_ = zerotrial.initialize(model=model, config=config)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if (args.checkpoints / "latest").is_file():
        engine.load_checkpoint(args.checkpoints)
        print(f"resumes after step {engine.global_steps}", flush=True)

    micro, parts = 2, 24 // (2 * ranks)
    while engine.global_steps < args.steps:
        step = engine.global_steps
        inputs, targets = batch_of(step, 24)
        total = torch.zeros(())
        for part in range(parts):
            begin = (part * ranks + rank) * micro
            mine = slice(begin, begin + micro)
            predicted = engine(inputs[mine].to(engine.device))
            loss = torch.nn.functional.mse_loss(predicted, targets[mine].to(engine.device))
            engine.backward(loss)
            engine.step()
            total += loss.detach().cpu() / (parts * ranks)
        if ranks > 1:
            torch.distributed.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1} loss {total.item():.6f}", flush=True)
        if (step + 1) % args.save_every == 0:
            engine.save_checkpoint(args.checkpoints)
        time.sleep(args.pause)
    engine.close(give_back=False)


if __name__ == "__main__":
    main()
