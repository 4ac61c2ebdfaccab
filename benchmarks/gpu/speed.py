"""Samples per second and MFU in bf16: stages 0-3, DDP and FSDP2 as shares of a loop by hand.

Sizes are GPT 124 M, 350 M and 1.3 B on bytes, first without and then with ``torch.compile`` of each
block. All run in this one process, on one GPU, in a world of one over NCCL. The loop by hand does
the same work: fp32 master weights, gradients in fp32, clipping, fused AdamW. It is measured first
and, uncompiled, again last for each size; shares refer to the first, the second shows the drift.
"""

import argparse
import gc
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore

from benchmarks.gpu.cases import Cases, device_of, parse_step, synchronize
from benchmarks.training.gpt import GPT, SIZES, batches
from benchmarks.training.peers import PEERS, Case
from zerotrial.extensions.profiler.flops import peak_flops

OURS = ["zerolab-0", "zerolab-1", "zerolab-2", "zerolab-3"]
OTHERS = ["ddp", "fsdp2"]
GOAL = 0.98
"""Share of the loop by hand that stages 0-3 must reach."""


def main() -> None:
    options, cases = parse_step(__doc__)
    device = device_of(options)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    for compiled in (False, True):
        for size in ["1m"] if options.rehearse else ["124m", "350m", "1.3b"]:
            measure_size(size, compiled, device, options, cases)
    dist.destroy_process_group()


def measure_size(
    size: str, compiled: bool, device: torch.device, options: argparse.Namespace, cases: Cases
) -> None:
    """Measure all peers of one size; report each at once, with its share of the loop by hand."""
    limits: list[float] = []
    peers = ["limit", *OURS, *OTHERS, "limit"]
    for peer in peers[:-1] if compiled else peers:  # compiling takes most of the time
        name = f"{size} {peer}{' compiled' if compiled else ''}"
        if peer == "limit" and limits:
            name += " again"
        try:
            figures = measure(peer, size, compiled, device, options)
        except Exception as error:  # noqa: BLE001 - one case must not end the others
            cases.add_error(name, error)
            continue
        finally:
            release(device)
        ok = None
        if peer == "limit":
            limits.append(figures["samples_per_s"])
        elif limits:
            figures["share_of_loop"] = figures["samples_per_s"] / limits[0]
            if peer in OURS and not options.rehearse:
                ok = figures["share_of_loop"] >= GOAL
        cases.add(name, ok=ok, **figures)


def measure(
    peer: str, size: str, compiled: bool, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Train a peer for a few steps.

    Returns:
        Samples per second from the median step, its spread, TFLOP/s, MFU, peak memory, last loss.
    """
    shape = SIZES[size]
    case = Case(peer, size, "bf16", 1, 1, shape.micro or 4)
    warmup, steps = (2, 3) if options.rehearse else (4, 14)
    name, _, stage = peer.partition("-")
    torch.manual_seed(0)
    with device:
        model = GPT(shape)
    if compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
    numel = sum(parameter.numel() for parameter in model.parameters())
    step = PEERS[name](case, model, device, int(stage or 0))
    del model
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    source = batches(case.micro, shape.sequence, 0)
    data = [next(source).to(device) for _ in range(warmup + steps)]
    seconds: list[float] = []
    loss = 0.0
    for index, batch in enumerate(data):
        synchronize(device)
        began = time.perf_counter()
        loss = step([batch])
        synchronize(device)
        if index >= warmup:
            seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    # 6 operations a parameter and token, and 6 for each pair of positions of causal attention
    operations = 6 * numel + 6 * shape.layers * shape.width * shape.sequence
    flops = case.micro * shape.sequence * operations / median
    figures: dict[str, Any] = {
        "samples_per_s": case.micro / median,
        "slowest_to_median": max(seconds) / median,
        "tflops": flops / 1e12,
    }
    peak = peak_flops(device, torch.bfloat16)
    if peak:
        figures["mfu"] = flops / peak
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    figures["loss"] = loss
    return figures


def release(device: torch.device) -> None:
    """Free what the last peer held."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
