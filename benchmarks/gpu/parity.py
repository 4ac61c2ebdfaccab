"""Compare stages 0-3 with a plain loop: losses, gradient norms and weights.

Every stage trains in fp32, bf16 and fp16: on one rank over NCCL, and on two ranks that share the
one GPU over gloo (NCCL refuses two ranks on one GPU). On a CPU all ranks use gloo. The plain loop
keeps fp32 master weights, sums gradients in fp32, and processes the micro-batches of all ranks one
after the other.
"""

import argparse
import itertools
import math
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.gpu.cases import Cases, describe_error, device_of, parse_step
from benchmarks.training.gpt import GPT, Size, batches
from zerotrial import initialize

SIZE = Size(width=128, layers=3, heads=4, sequence=64)
STEPS, MICRO_STEPS, MICRO, CLIP, LR, SCALE = 6, 2, 4, 1.0, 1e-3, 1024.0
EPS = 1e-4
"""Of Adam; larger than usual, since the gradient of a key's bias is nothing but rounding errors."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 2e-5, "bf16": 1e-2, "fp16": 2e-3}
"""Largest relative difference of a loss, and of all weights together."""

Figures = dict[str, float]


def main() -> None:
    options, cases = parse_step(__doc__)
    for ranks in (1, 2):
        names = [f"stage {s} {p} {ranks} rank(s)" for s, p in combinations()]
        with tempfile.TemporaryDirectory() as folder:
            run_world(ranks, folder, options, cases, names)


def combinations() -> list[tuple[int, str]]:
    """Return every stage with every precision, the simplest first."""
    return [(stage, precision) for precision, stage in itertools.product(DTYPES, range(4))]


def run_world(
    ranks: int, folder: str, options: argparse.Namespace, cases: Cases, names: Sequence[str]
) -> None:
    """Start the ranks, report what rank 0 sends, and the cases that are missing at the end."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    processes = [
        context.Process(target=run_rank, args=(rank, ranks, folder, options.rehearse, sender))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    sender.close()
    reported = set()
    try:
        while True:
            name, ok, figures = receiver.recv()
            reported.add(name)
            cases.add(name, ok=ok, **figures)
    except EOFError:  # every rank has ended
        pass
    for process in processes:
        process.join()
    for name in names:
        if name not in reported:
            cases.add(name, ok=False, error="a rank ended before this case")


def run_rank(rank: int, ranks: int, folder: str, rehearse: bool, sender: Any) -> None:
    """Measure every case on one rank; rank 0 sends the results."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    if rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    device = device_of(argparse.Namespace(rehearse=rehearse))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" and ranks == 1 else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    expected = {name: train_plainly(dtype, ranks, device) for name, dtype in DTYPES.items()}
    for stage, precision in combinations():
        name = f"stage {stage} {precision} {ranks} rank(s)"
        try:
            course = train(stage, precision, rank, ranks, device, folder)
            figures = compare(course, expected[precision])
            worst = max(figures["loss_diff"], figures["weights_diff"])
            result: tuple[str, bool, Any] = (name, worst < TOLERANCE[precision], figures)
        except Exception as error:  # noqa: BLE001 - one case must not end the others
            result = (name, False, {"error": describe_error(error)})
        if rank == 0:
            sender.send(result)
    dist.barrier()
    dist.destroy_process_group()


class Course:
    """Losses and gradient norms of each step, and the weights at the end, by name."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.weights: dict[str, Tensor] = {}


def compare(course: Course, expected: Course) -> Figures:
    """Return the largest relative differences of losses and norms, and that of all weights."""

    def largest(found: Sequence[float], wanted: Sequence[float]) -> float:
        return max(abs(f - w) / abs(w) for f, w in zip(found, wanted, strict=True))

    difference = sum(
        float((weight.double() - expected.weights[name].double()).square().sum())
        for name, weight in course.weights.items()
    )
    total = sum(float(weight.double().square().sum()) for weight in expected.weights.values())
    return {
        "loss_diff": largest(course.losses, expected.losses),
        "norm_diff": largest(course.norms, expected.norms),
        "weights_diff": math.sqrt(difference / total),
    }


def make_model(device: torch.device) -> GPT:
    """Make the same model on every rank and device."""
    torch.manual_seed(0)
    return GPT(SIZE).to(device)


def train(
    stage: int, precision: str, rank: int, ranks: int, device: torch.device, folder: str
) -> Course:
    """Train with the engine. **Collective**; rank 0 gets the weights."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": MICRO_STEPS,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": EPS, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200_000},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": SCALE}
    engine = initialize(model=make_model(device), config=config, device=device)[0]
    source = batches(MICRO, SIZE.sequence, rank)
    course = Course()
    for _ in range(STEPS):
        total = 0.0
        for _ in range(MICRO_STEPS):
            loss = engine(next(source).to(device))
            engine.backward(loss)
            engine.step()
            total += loss.item() / MICRO_STEPS
        mean = torch.tensor(total, dtype=torch.float64)
        if ranks > 1:
            dist.all_reduce(mean)
        course.losses.append(mean.item() / ranks)
        course.norms.append(float(engine.get_global_grad_norm()))
    exported = engine.export(f"{folder}/weights.safetensors")
    if rank == 0:
        course.weights = load_file(exported)
    engine.close()
    return course


def train_plainly(dtype: torch.dtype, ranks: int, device: torch.device) -> Course:
    """Train without an engine and without communication, on all ranks' micro-batches."""
    masters = make_model(device)
    model = make_model(device).to(dtype)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=LR, eps=EPS, weight_decay=0.01)
    sources = [batches(MICRO, SIZE.sequence, rank) for rank in range(ranks)]
    scale = SCALE if dtype == torch.float16 else 1.0
    count = ranks * MICRO_STEPS
    pairs = list(zip(model.parameters(), masters.parameters(), strict=True))
    course = Course()
    for _ in range(STEPS):
        total = 0.0
        for source in sources * MICRO_STEPS:
            loss = model(next(source).to(device))
            (loss * scale / count).backward()
            total += loss.item() / count
            for weight, master in pairs:
                assert weight.grad is not None
                gradient = weight.grad.float() / scale
                master.grad = gradient if master.grad is None else master.grad + gradient
                weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in pairs:
                weight.copy_(master)
        course.losses.append(total)
        course.norms.append(float(norm))
    course.weights = {name: weight.detach().cpu() for name, weight in masters.named_parameters()}
    return course


if __name__ == "__main__":
    main()
