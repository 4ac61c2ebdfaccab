"""An AlexNet for small images in pipeline stages, as DeepSpeed's example has it; a plain script."""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import zerotrial
from zerotrial import LayerSpec, PipelineModule


def digits() -> TensorDataset:
    """1,797 images of 8 x 8 pixels, made 32 x 32 and of three colours like those of CIFAR-10."""
    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    images = functional.interpolate(pixels, size=32, mode="bilinear").expand(-1, 3, -1, -1)
    return TensorDataset(images.contiguous(), torch.tensor(data.target))


def alexnet(classes: int = 10) -> list[object]:
    """The layers, end to end; only those of this rank are built."""
    return [
        LayerSpec(nn.Conv2d, 3, 32, kernel_size=5, stride=2, padding=2),
        LayerSpec(nn.ReLU),
        LayerSpec(nn.MaxPool2d, kernel_size=2),
        LayerSpec(nn.Conv2d, 32, 64, kernel_size=3, padding=1),
        LayerSpec(nn.ReLU),
        LayerSpec(nn.MaxPool2d, kernel_size=2),
        LayerSpec(nn.Conv2d, 64, 96, kernel_size=3, padding=1),
        LayerSpec(nn.ReLU),
        LayerSpec(nn.Conv2d, 96, 64, kernel_size=3, padding=1),
        LayerSpec(nn.ReLU),
        LayerSpec(nn.AdaptiveAvgPool2d, (2, 2)),
        lambda x: torch.flatten(x, 1),
        LayerSpec(nn.Dropout),
        LayerSpec(nn.Linear, 64 * 4, 128),
        LayerSpec(nn.ReLU),
        LayerSpec(nn.Linear, 128, classes),
    ]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2)
    parser.add_argument("-s", "--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1138)
    parser.add_argument("--local_rank", type=int, default=0, help="set by a launcher")
    parser.add_argument("--save", help="directory of checkpoints; resumes from the latest")
    zerotrial.add_config_arguments(parser)
    return parser.parse_args()


def main() -> None:
    """Train."""
    args = arguments()
    torch.manual_seed(args.seed)
    model = PipelineModule(
        alexnet(),
        num_stages=args.pipeline_parallel_size,
        loss_fn=nn.CrossEntropyLoss(),
        partition_method="parameters",
    )
    engine, _, _, _ = zerotrial.initialize(
        args=args,
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        training_data=digits(),
    )
    if args.save and Path(args.save, "latest").exists():
        engine.load_checkpoint(args.save)
    while engine.global_steps < args.steps:
        loss = engine.train_batch()
        if engine.global_rank == 0 and engine.global_steps % 10 == 0:
            print(f"step {engine.global_steps:4d}  loss {loss:.4f}", flush=True)
    if args.save:
        engine.save_checkpoint(args.save)


if __name__ == "__main__":
    main()
