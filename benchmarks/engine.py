"""Samples per second of our stages beside DDP, FSDP2, DeepSpeed, and the limit.

    python -m benchmarks.engine                                    everything, about an hour
    python -m benchmarks.engine --sizes 10m --ranks 2 --precisions fp32 --stages 1 2
    python -m benchmarks.engine --device cuda                      350 M and 1.3 B on one GPU
    python -m benchmarks.engine --device cuda --offload --stages 1 2

Every peer is a world of processes. The peers of a case take turns, ``--rounds`` times, so that a
disturbance of the machine meets all of them: with fresh processes each time, or, with
``--together``, in worlds that all stay alive (which needs the memory of all at once), so that turns
are as short as a few steps and a machine that is fast one minute and slow the next disturbs no
ratio. A ratio is the median, over the rounds, of the ratio of the two medians of one round; "CPU
ms" is the processor time of a step, over all ranks. The limit is the same ranks training with no
collective at all, in a loop written by hand.

A table goes to stdout, and everything to ``benchmarks/results/engine.json``.
"""

import argparse
import importlib.util
import itertools
import json
import math
import os
import statistics
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.training.gpt import SIZES
from benchmarks.training.peers import Case, make_step
from benchmarks.training.worlds import World, WorldError, turns

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
GLOBAL_BATCH = 16
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "sizes": ["10m", "50m"],
        "precisions": ["fp32", "bf16"],
        "ranks": [1, 2, 4],
        "accumulation": 2,
        "warmup": 2,
    },
    "cuda": {
        "sizes": ["350m", "1.3b"],
        "precisions": ["bf16"],
        "ranks": [1],
        "accumulation": 1,
        "warmup": 5,
    },
}


def main() -> int:
    options = _options()
    if options.worker:
        _work(Case(**json.loads(options.worker)), options)
        return 0
    peers = _peers(options)
    results: list[dict[str, Any]] = []
    for size, precision, ranks in itertools.product(
        options.sizes, options.precisions, options.ranks
    ):
        cases = [_case(peer, size, precision, ranks, options) for peer in peers]
        answers = (_together if options.together else _afresh)(cases, options)
        results += [_row(case, answers[case.peer], options) for case in cases]
        _relate(results)
        _save(results, options)
        _print_table([r for r in results if _same_case(r, size, precision, ranks)])
    _print_goals(results, options)
    return 0


Answers = dict[str, list[dict[str, Any]]]
"""Peer to what it answered in each round."""


def _afresh(cases: list[Case], options: argparse.Namespace) -> Answers:
    """Measure each peer in each round in processes of its own."""
    answers: Answers = {case.peer: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            world = _world(case, options)
            _turn(case, world, answers)
            world.close()
    return answers


def _together(cases: list[Case], options: argparse.Namespace) -> Answers:
    """Measure peers that are all alive, in turns, there and back."""
    answers: Answers = {case.peer: [] for case in cases}
    worlds: list[tuple[Case, World]] = []
    for case in cases:
        world = _world(case, options)
        if _turn(case, world, {case.peer: []}):  # compiles, allocates; not counted
            worlds.append((case, world))
        else:
            world.close()
    for _ in range(options.rounds):
        for case, world in worlds:
            _turn(case, world, answers)
        worlds.reverse()
    for _, world in worlds:
        world.close()
    return answers


def _turn(case: Case, world: World, answers: Answers) -> bool:
    try:
        answers[case.peer].append(world.turn())
    except WorldError as error:
        print(f"{case.peer} {case.size} {case.precision} {case.ranks}: failed\n{error}")
        return False
    return True


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", help=", ".join(SIZES))
    parser.add_argument("--precisions", nargs="+", help="fp32, bf16")
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--peers", nargs="+", help="zerolab, deepspeed, ddp, fsdp2, limit")
    parser.add_argument("--before", metavar="DIR", help="measure another working tree's, too")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--together", action="store_true", help="peers stay alive between turns")
    parser.add_argument("--steps", type=int, default=0, help="timed steps a round; 0: by size")
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--threads", type=int, default=0, help="of a rank; 0: cores / ranks")
    parser.add_argument("--micro", type=int, default=0, help="samples of a micro-batch; 0: by size")
    parser.add_argument("--accumulation", type=int)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--peak-tflops", type=float, help="of one device, for MFU; known for GPUs")
    parser.add_argument("--offload", action="store_true", help="optimizer states in host memory")
    parser.add_argument("--output", default=str(ROOT / "benchmarks/results/engine.json"))
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one world")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, value in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def _peers(options: argparse.Namespace) -> list[str]:
    wanted = options.peers or ["limit", "ddp", "fsdp2", "zerolab", "deepspeed"]
    if "deepspeed" in wanted and importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed: its columns stay empty (pip install --group bench)")
        wanted = [peer for peer in wanted if peer != "deepspeed"]
    if options.before:
        wanted = [*wanted, "before"]
    found = []
    for peer in wanted:
        staged = peer in {"zerolab", "deepspeed", "before"}
        found += [f"{peer}-{stage}" for stage in options.stages] if staged else [peer]
    return found


def _case(peer: str, size: str, precision: str, ranks: int, options: argparse.Namespace) -> Case:
    micro = options.micro or SIZES[size].micro or GLOBAL_BATCH // (ranks * options.accumulation)
    return Case(peer, size, precision, ranks, options.accumulation, micro, options.offload)


def _world(case: Case, options: argparse.Namespace) -> World:
    sources = [str(ROOT)]
    if case.peer.startswith("before"):
        sources += [str(Path(options.before, name).resolve()) for name in ("platform", "trials")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(options.threads or max(1, (os.cpu_count() or 1) // case.ranks)),
        "WORLD_SIZE": str(case.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if options.device == "cpu":
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.engine", *sys.argv[1:]]
    command += ["--worker", json.dumps(asdict(case))]
    return World(command, case.ranks, environment, ROOT, options.timeout)


def _peak_flops(case: Case, device: "torch.device") -> float | None:
    if case.peer.startswith("before"):
        return None  # another tree may have it in another place
    from zerotrial.engine.module.precision import DTYPES
    from zerotrial.extensions.profiler.flops import peak_flops

    return peak_flops(device, DTYPES[case.precision])


def _work(case: Case, options: argparse.Namespace) -> None:
    """One rank of one case."""
    import resource

    import torch
    import torch.distributed as dist

    from benchmarks.training.gpt import batches

    device = torch.device(options.device)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(options.rank)
        device = torch.device("cuda", options.rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{options.store}/rendezvous",
        rank=options.rank,
        world_size=case.ranks,
        timeout=timedelta(seconds=options.timeout),
    )
    step, numel = make_step(case, device)
    source = batches(case.micro, SIZES[case.size].sequence, options.rank)
    few = 20 if device.type == "cuda" else 6
    count = options.steps or (12 if case.size in {"1m", "10m"} else few)
    warmup = options.warmup
    for _ in turns():
        seconds, busy, losses = [], [], []
        for index in range(warmup + count):
            micro_batches = [next(source).to(device) for _ in range(case.accumulation)]
            if case.peer != "limit":
                dist.barrier()
            used, started = time.process_time(), time.perf_counter()
            losses.append(step(micro_batches))
            if device.type == "cuda":
                torch.cuda.synchronize()
            if index >= warmup:
                seconds.append(time.perf_counter() - started)
                busy.append(time.process_time() - used)
        slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        work = torch.tensor(statistics.median(busy), dtype=torch.float64, device=device)
        dist.all_reduce(work)
        mean_loss = torch.tensor(losses[-1], dtype=torch.float64, device=device)
        dist.all_reduce(mean_loss, op=dist.ReduceOp.AVG)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        if options.rank == 0:
            answer = {
                "seconds": slowest.tolist(),
                "cpu_seconds": work.item(),
                "parameters": numel,
                "loss": mean_loss.item(),
                "peak_bytes": peak,
                "peak_flops": _peak_flops(case, device),
            }
            os.write(options.answers, json.dumps(answer).encode() + b"\n")
        warmup = min(warmup, 1)  # the caches are cold, nothing else is
    dist.barrier()
    dist.destroy_process_group()


def _row(case: Case, answers: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = asdict(case)
    if answers:
        note = answers[-1]
        row |= note
        row["cpu_seconds"] = statistics.median(answer["cpu_seconds"] for answer in answers)
        row["rounds"] = [statistics.median(answer["seconds"]) for answer in answers]
        seconds = list(itertools.chain.from_iterable(answer["seconds"] for answer in answers))
        samples = case.micro * case.ranks * case.accumulation
        row["samples_per_s"] = samples / statistics.median(seconds)
        row["best_samples_per_s"] = samples / min(seconds)
        row["seconds"] = seconds
        size = SIZES[case.size]
        # 6 operations a parameter and token, and 6 for each pair of positions that causal
        # attention compares, forward and backward together
        operations = 6 * note["parameters"] + 6 * size.layers * size.width * size.sequence
        row["tflops"] = row["samples_per_s"] * size.sequence * operations / 1e12
        peak = options.peak_tflops or (note["peak_flops"] or 0.0) / 1e12
        if peak:
            row["mfu"] = row["tflops"] / peak / case.ranks
    return row


def _same_case(row: dict[str, Any], size: str, precision: str, ranks: int) -> bool:
    return (row["size"], row["precision"], row["ranks"]) == (size, precision, ranks)


def _relate(results: list[dict[str, Any]]) -> None:
    """Add the ratios to DeepSpeed at the same stage, to DDP, to FSDP2 and to the limit."""
    rounds = {(r["peer"], r["size"], r["precision"], r["ranks"]): r.get("rounds") for r in results}
    for row in results:
        mine = row.get("rounds")
        stage = row["peer"].partition("-")[2]
        for name in (
            "limit",
            "ddp",
            "fsdp2",
            *(f"{n}-{stage}" for n in ("deepspeed", "before") if stage),
        ):
            other = rounds.get((name, row["size"], row["precision"], row["ranks"]))
            if mine and other:
                pairs = [theirs / ours for theirs, ours in zip(other, mine, strict=False)]
                row[f"to_{name.partition('-')[0]}"] = statistics.median(pairs)


def _save(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    path = Path(options.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "device": options.device,
        "results": results,
    }
    path.write_text(json.dumps(content, indent=1))


def _print_table(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    numel = next((r["parameters"] for r in rows if "parameters" in r), 0)
    print(
        f"\n{first['size']} ({numel / 1e6:.1f} M parameters), {first['precision']}, "
        f"{first['ranks']} rank(s), {first['accumulation']} x {first['micro']} samples a rank"
    )
    names = ("limit", "ddp", "fsdp2", "deepspeed", "before")
    print(
        f"{'':14}{'samples/s':>10}{'best':>8}{'CPU ms':>8}{'TFLOP/s':>9}{'MFU':>7}"
        f"{'MiB':>7}{'loss':>8}",
        end="",
    )
    print("".join(f"{'/ ' + name:>12}" for name in names))
    for row in rows:
        if "samples_per_s" not in row:
            print(f"{row['peer']:14}{'failed':>10}")
            continue
        print(
            f"{row['peer']:14}{row['samples_per_s']:10.1f}{row['best_samples_per_s']:8.1f}"
            f"{row['cpu_seconds'] * 1e3:8.0f}{row['tflops']:9.3f}"
            f"{format(row['mfu'], '.1%') if 'mfu' in row else '':>7}"
            f"{row['peak_bytes'] / 2**20:7.0f}{row['loss']:8.4f}",
            end="",
        )
        ratios = [row.get(f"to_{name}") for name in names]
        print("".join(f"{ratio:12.2f}" if ratio else f"{'':12}" for ratio in ratios), flush=True)


def _print_goals(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    ours = [r for r in results if r["peer"].startswith("zerolab-")]
    alone = [r for r in ours if r["ranks"] == 1]
    several = [r for r in ours if r["ranks"] > 1]
    if several:
        print("\ngoals, over all cases with more than one rank:")
        ratios = [r["to_deepspeed"] for r in several if "to_deepspeed" in r]
        if ratios:
            mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
            print(
                f"  to DeepSpeed: geometric mean {mean:.2f} (1.25), smallest {min(ratios):.2f} "
                "(1.00)"
            )
        flat, sharded = _flat(several), [r for r in several if r["peer"].endswith("3")]
        _print_smallest("stages 0-2 to DDP", flat, "to_ddp", 1.0)
        _print_smallest("stages 0-2 to the limit", flat, "to_limit", 0.9)
        _print_smallest("stage 3 to FSDP2", sharded, "to_fsdp2", 2.0)
    if alone and options.device == "cuda":
        print("\ngoals, on one GPU:")
        if options.offload:
            _print_smallest("optimizer on the host, to DeepSpeed", alone, "to_deepspeed", 1.0)
        else:
            _print_smallest("stages 0-2 to the loop by hand", _flat(alone), "to_limit", 0.98)


def _flat(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if not row["peer"].endswith("3")]


def _print_smallest(name: str, rows: list[dict[str, Any]], key: str, goal: float) -> None:
    found = [row[key] for row in rows if key in row]
    if found:
        print(f"  {name}, smallest: {min(found):.2f} ({goal:.2f})")


if __name__ == "__main__":
    sys.exit(main())
