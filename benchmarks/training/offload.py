"""Step time with optimizer states in host memory or in files, as ratios to states on the device.

    python -m benchmarks.training.offload    10 M parameters, 2 ranks, about 2 minutes
    python -m benchmarks.training.offload --size 50m --ranks 4 --path /mnt/nvme
    python -m benchmarks.training.offload --size 1.3b --micro 8   on the GPUs, where there are any

The three take turns, ``--rounds`` times, in one world of processes; the figure is the median step.
On a CPU, ``cpu`` is where the states are anyway. Files are read and written through the page cache,
so what is measured is the disk only where the states do not fit in memory.

A table goes to stdout, and everything to ``benchmarks/results/offload.json``.
"""

import argparse
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.training.gpt import GPT, SIZES, batches
from benchmarks.training.spawned import results_of
from zerotrial.engine import initialize

PLACES = ("none", "cpu", "nvme")


def main() -> None:
    options = _options()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.ranks)))
    _report(results_of(_rank, options.ranks, options), options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(SIZES), default="10m")
    parser.add_argument("--ranks", type=int, default=min(2, torch.cuda.device_count()) or 2)
    parser.add_argument("--micro", type=int, default=2, help="samples of a micro-batch")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed, in a round")
    parser.add_argument("--path", default=None, help="of the files; a temporary one if not given")
    return parser.parse_args()


def _rank(rank: int, directory: str, options: argparse.Namespace, queue: Any) -> None:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=600),
    )
    results = [
        _measure(stage, options, options.path or f"{directory}/states") for stage in options.stages
    ]
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        queue.put(results)


def _measure(stage: int, options: argparse.Namespace, path: str) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {place: [] for place in PLACES}
    held: dict[str, int] = {}
    for _ in range(options.rounds):
        for place in PLACES:
            engine = _engine(stage, place, options, path)
            data = batches(options.micro, SIZES[options.size].sequence, dist.get_rank())
            for step in range(options.steps + 2):
                _wait_for_device()
                started = time.perf_counter()
                engine.backward(engine(next(data).to(engine.device)))
                engine.step()
                _wait_for_device()
                if step >= 2:
                    seconds[place].append(time.perf_counter() - started)
            states = engine.stage.tensors_by_kind()
            held[place] = sum(
                tensor.nbytes for kind in ("master", "optimizer") for tensor in states.get(kind, [])
            )
            engine.close()
            dist.barrier()
    medians = {place: statistics.median(values) for place, values in seconds.items()}
    return {
        "stage": stage,
        "seconds": medians,
        "ratio": {place: medians[place] / medians["none"] for place in PLACES},
        "bytes_of_states_in_memory": held,
    }


def _engine(stage: int, place: str, options: argparse.Namespace, path: str) -> Any:
    torch.manual_seed(0)
    offload = {"device": place} | ({"nvme_path": path} if place == "nvme" else {})
    config = {
        "train_micro_batch_size_per_gpu": options.micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": options.precision == "bf16"},
        "zero_optimization": {"stage": stage, "offload_optimizer": offload},
    }
    return initialize(model=GPT(SIZES[options.size]), config=config)[0]


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _report(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    print(f"{options.size} parameters, {options.ranks} ranks, {options.precision}; s per step")
    print(
        "| stage | none | cpu | nvme | cpu / none | nvme / none | states in memory, nvme / none |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in results:
        seconds, ratio = row["seconds"], row["ratio"]
        held = row["bytes_of_states_in_memory"]
        cells = [f"{seconds[place]:.3f}" for place in PLACES]
        cells += [f"{ratio['cpu']:.2f}", f"{ratio['nvme']:.2f}"]
        cells.append(f"{held['nvme'] / max(1, held['none']):.2f}")
        print(f"| {row['stage']} | {' | '.join(cells)} |")
    target = Path(__file__).parents[1] / "results" / "offload.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"options": vars(options), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
