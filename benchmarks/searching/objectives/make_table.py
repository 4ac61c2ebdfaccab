"""Makes ``curves.json``: learning curves of real networks, measured once.

    python -m benchmarks.searching.objectives.make_table

Two spaces of 240 random configurations each: a fully connected network and a small convolutional
one, on scikit-learn's digits, 27 epochs, the validation loss after each. About five minutes on
one core. Reads nothing else, and needs no download.
"""

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from benchmarks.searching.objective import EPOCHS
from benchmarks.searching.objectives.table import SPACES
from zerolab.schema.space import Space

TABLE = Path(__file__).parent / "curves.json"
CONFIGURATIONS = 240
CAP = 5.0
"""A loss above it counts as diverged."""


def main() -> None:
    torch.set_num_threads(1)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    tables = {}
    for name, space in SPACES.items():
        rng, reader = Random(f"table of {name}"), Space(space)
        rows = []
        for index in range(CONFIGURATIONS):
            point = reader.point(rng)
            rows.append([point, train(name, reader.hparams(point), images, labels, index)])
            if index % 25 == 0:
                print(name, index, rows[-1][1][-1], flush=True)
        tables[name] = rows
    TABLE.write_text(json.dumps(tables, separators=(",", ":")).replace("]],[[", "]],\n[[") + "\n")


def train(
    name: str, hparams: dict[str, Any], images: torch.Tensor, labels: torch.Tensor, seed: int
) -> list[float | None]:
    """Train on 600 images and give the loss on the others after each epoch; None: diverged."""
    torch.manual_seed(seed)
    model = perceptron(hparams) if name == "digits mlp" else convolution(hparams)
    lr, decay = hparams["lr"], hparams["weight_decay"]
    if hparams["optimizer"] == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, weight_decay=decay
        )
    else:
        momentum = hparams.get("momentum", 0.9)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    noisy = labels[:600].clone()
    noisy[::10] = (noisy[::10] + 1) % 10  # a tenth is wrong: what fits everything overfits
    curve: list[float | None] = []
    for _ in range(EPOCHS):
        model.train()
        for part in torch.randperm(600).split(hparams["batch_size"]):
            loss = nn.functional.cross_entropy(model(images[part]), noisy[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            value = float(nn.functional.cross_entropy(model(images[600:]), labels[600:]))
        if not math.isfinite(value) or value > CAP:
            return curve + [None] * (EPOCHS - len(curve))
        curve.append(round(value, 4))
    return curve


def perceptron(hparams: dict[str, Any]) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    size = 64
    for _ in range(hparams["layers"]):
        activation = nn.ReLU() if hparams["activation"] == "relu" else nn.Tanh()
        layers += [nn.Linear(size, hparams["width"]), activation, nn.Dropout(hparams["dropout"])]
        size = hparams["width"]
    return nn.Sequential(*layers, nn.Linear(size, 10))


def convolution(hparams: dict[str, Any]) -> nn.Module:
    channels = hparams["channels"]
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, channels, 3, padding=1),
        nn.BatchNorm2d(channels) if hparams["norm"] else nn.Identity(),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(hparams["dropout"]),
        nn.Linear(8 * channels, 10),
    )


if __name__ == "__main__":
    main()
