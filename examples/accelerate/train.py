"""A loop on Accelerate, as its users write it; the launch file says how weights are sharded."""

import argparse
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

CONTEXT = 64  # bytes that the model sees at once


def windows(count: int) -> TensorDataset:
    """The first bytes of the standard library's modules."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("[a-d]*.py")))
    bytes_ = torch.frombuffer(bytearray(text[: count * CONTEXT]), dtype=torch.uint8)
    return TensorDataset(bytes_.view(count, CONTEXT).long())


class Model(nn.Module):
    """Reads bytes with a recurrent layer, and scores each next one."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.scores = nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map byte values (batch, context) to the mean loss of the next ones."""
        memory, _ = self.memory(self.bytes(x[:, :-1]))
        scores = self.scores(memory).float()
        return functional.cross_entropy(scores.flatten(0, 1), x[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--out", default="out")
    parser.add_argument("--local_rank", type=int, default=0, help="set by a launcher")
    parser.add_argument("--resume", action="store_true", help="resume from --out")
    arguments = parser.parse_args()

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = windows(arguments.windows + 256)
    training = DataLoader(TensorDataset(data.tensors[0][:-256]), batch_size=16, shuffle=True)
    held_out = DataLoader(TensorDataset(data.tensors[0][-256:]), batch_size=16)
    model, optimizer, training, held_out = accelerator.prepare(model, optimizer, training, held_out)
    if arguments.resume:
        accelerator.load_state(f"{arguments.out}/state")

    for epoch in range(arguments.epochs):
        for step, (x,) in enumerate(training):
            with accelerator.accumulate(model):
                loss = model(x)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if step % 20 == 0:
                mean = accelerator.reduce(loss.detach(), "mean").item()
                accelerator.print(f"epoch {epoch} step {step}: loss {mean:.4f}")
    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics(model(x)[None]) for (x,) in held_out]
    accelerator.print(f"held out: loss {torch.cat(losses).mean().item():.4f}")
    accelerator.save_state(f"{arguments.out}/state")
    accelerator.save_model(model, f"{arguments.out}/model")


if __name__ == "__main__":
    main()
