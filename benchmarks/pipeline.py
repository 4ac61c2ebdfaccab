"""The share of time that pipeline ranks wait, and what they send, beside the formulas.

    python -m benchmarks.pipeline                      4 stages, 8 micro-batches, under a minute
    python -m benchmarks.pipeline --stages 2 --micro-batches 4 16 --wait-ms 20

Layers sleep in place of computing: forward once, backward twice, once for the gradient of the input
and once for that of the weight. So stages do not take cores from each other: what is measured is
the schedule, and the time that sending takes. A rank waits ``1 - slept / elapsed``; shown is the
one that waits least: the median of the steps, and the fastest one. Where other programs run on the
machine, a sleep ends late and a rank seems to wait: the fastest step is nearer to the schedule.

A table goes to stdout, and everything to ``benchmarks/results/pipeline.json``.
"""

import argparse
import json
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.training.spawned import results_of
from zerotrial.engine import initialize
from zerotrial.engine.pipeline import LayerSpec, PipelineModule

WIDTH, SAMPLES = 64, 2
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}
"""Name to chunks on each rank."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0].clone(), None, None


class Layer(nn.Module):
    """Takes as long forward as for each of the two gradients."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        weight = _Sleep.apply(self.weight, 0.0, self.seconds)
        passed: Tensor = _Sleep.apply(x, self.seconds, self.seconds)
        return passed * weight


def main() -> None:
    options = _options()
    _report(results_of(_rank, options.stages, options), options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--wait-ms", type=float, default=10.0, help="of a layer, forward")
    parser.add_argument("--steps", type=int, default=5, help="timed, after one that is not")
    return parser.parse_args()


def _rank(rank: int, directory: str, options: argparse.Namespace, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=options.stages,
        timeout=timedelta(seconds=600),
    )
    results = [
        _measure(name, chunks, count, options)
        for count in options.micro_batches
        for name, chunks in SCHEDULES.items()
    ]
    if rank == 0:
        queue.put(results)
    dist.destroy_process_group()


def _measure(name: str, chunks: int, count: int, options: argparse.Namespace) -> dict[str, Any]:
    seconds, stages = options.wait_ms / 1000, options.stages
    model = PipelineModule(
        [LayerSpec(Layer, seconds) for _ in range(2 * stages)],
        num_stages=stages,
        loss_fn=lambda x, _: x.square().mean(),
        partition_method="uniform",
        chunks=chunks,
    )
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": count,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "pipeline": {"schedule": name},
    }
    engine: Any = initialize(model=model, config=config)[0]
    batch = torch.ones(SAMPLES, WIDTH)
    engine.train_batch(iter([(batch, batch)] * count))
    times = []
    before = dict(engine.traffic)
    for _ in range(options.steps):
        dist.barrier()
        started = time.perf_counter()
        engine.train_batch(iter([(batch, batch)] * count))
        times.append(time.perf_counter() - started)
    slept = count * 2 * 3 * seconds
    sent = {axis: (n - before[axis]) / options.steps for axis, n in engine.traffic.items()}
    engine.close()
    total = stages * chunks
    activation = SAMPLES * WIDTH
    everyone: list[Any] = [None] * stages
    dist.all_gather_object(everyone, (statistics.median(times), min(times), sent["pipe"]))
    expected = (stages - 1) / (chunks * count + stages - 1)
    return {
        "schedule": name,
        "micro_batches": count,
        "waits": 1 - slept / min(median for median, _, _ in everyone),
        "waits_fastest": 1 - slept / min(fastest for _, fastest, _ in everyone),
        "formula": None if name == "zero-bubble" else expected,
        "sent": sum(n for _, _, n in everyone),
        "sent_formula": 2 * count * activation * (total - 1),
    }


def _report(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    print(f"{options.stages} stages, {options.wait_ms:g} ms a layer")
    titles = f"{'waits':>6}  {'fastest':>7}  {'formula':>7}  {'sent':>8}  {'formula':>8}"
    print(f"{'schedule':<12} {'m':>3}  {titles}")
    for one in results:
        formula = "" if one["formula"] is None else f"{one['formula']:.1%}"
        print(
            f"{one['schedule']:<12} {one['micro_batches']:>3}  {one['waits']:>6.1%}  "
            f"{one['waits_fastest']:>7.1%}  {formula:>7}  "
            f"{one['sent']:>8.0f}  {one['sent_formula']:>8}"
        )
    path = Path(__file__).parent / "results" / "pipeline.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
