"""Estimate the memory of each rank at every ZeRO stage, before anything trains.

The class of the trial is built as in a run, except that tensors have no memory (torch's meta
device) and that ``zerotrial.initialize`` only measures the model. The sizes go into the formulas of
:mod:`zerotrial.engine.memory`, and the result is compared with the devices of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import torch

from zerolab.config.engine.trial_values import trial_values
from zerolab.config.experiment.experiment_config import ExperimentConfig
from zerolab.config.experiment.layers import read_experiment
from zerolab.config.experiment.model_files import FolderFiles
from zerolab.config.validation import check_experiment, with_ranks
from zerolab.contract.spec import RunSpec
from zerolab.errors import TrialError, ZerolabError
from zerolab.formatting import size_text
from zerolab.schema.hyperparameters import sample_hyperparameters
from zerotrial.context import ZeroTrialContext
from zerotrial.engine.flat.layout import build_buckets, choose_bucket_numel
from zerotrial.engine.protocols import NamedParameter, ParamGroup
from zerotrial.extensions.planner.formulas import WHOLE, Device, MemoryEstimate, Place, every_choice
from zerotrial.extensions.planner.model_profile import ModelProfile, profile_trial
from zerotrial.process.entrypoint import load_trial_class
from zerotrial.ranks import PlannedRanks

__all__ = ["Devices", "Plan", "estimates", "find_devices", "fits", "main", "make_plan"]

HEADROOM = 0.8
"""Share of a device's memory for model states and working set; the rest is for activations."""

_KEYS = ("stage", "world_size", "offload_optimizer", "offload_param")
_BYTES = tuple(f.name for f in fields(MemoryEstimate) if f.name not in _KEYS)
"""Fields that add up over the engines of a trial."""


@dataclass(frozen=True)
class Devices:
    """Memory that one rank may use."""

    kind: Device
    name: str
    count: int
    """GPUs, or CPU cores."""
    device_bytes: int
    """Memory of a GPU; on CPU one rank's share of the machine's memory."""
    host_bytes: int
    """One rank's share of the machine's memory."""
    disk_bytes: int
    """Free space for files of offloaded states."""


@dataclass(frozen=True)
class Plan:
    """Estimates of every stage and offload, least communication first."""

    world_size: int
    engines: Sequence[ModelProfile]
    devices: Devices
    choices: Sequence[MemoryEstimate]

    @property
    def recommended(self) -> MemoryEstimate | None:
        """First choice that fits."""
        return next((choice for choice in self.choices if fits(choice, self.devices)), None)

    @property
    def configured(self) -> MemoryEstimate | None:
        """Choice of the trial's configuration."""
        zero = self.engines[0].config.zero_optimization
        states, shards = zero.offload_optimizer.device, zero.offload_param.device
        if shards != "none" and states == "none":
            states = "cpu"  # states follow the shards
        now = (zero.stage, states, shards)
        for choice in self.choices:
            if (choice.stage, choice.offload_optimizer, choice.offload_param) == now:
                return choice
        return None


def make_plan(
    file: Path,
    world_size: int | None = None,
    gpu_gb: float | None = None,
    host_gb: float | None = None,
) -> Plan:
    """Read an experiment, build its model, and estimate every stage and offload.

    Args:
        file: Experiment file; the model's code is in its folder.
        world_size: Ranks; None: ``resources.slots_per_trial``.
        gpu_gb: Memory of each rank's GPU, GB; None: the devices of this machine.
        host_gb: With ``gpu_gb``: memory of the host per rank, GB; None: as the GPU's.

    Raises:
        ZerolabError: If the experiment or its trial is invalid, or the ranks cannot share its
            batch.
    """
    directory = file.resolve().parent
    content = read_experiment(file)
    if world_size is not None:
        content = with_ranks(content, world_size)
    experiment = check_experiment(content, FolderFiles(directory), str(file))
    ranks = experiment.resources.slots_per_trial
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(directory):
        engines = profile_trial(lambda: _build_trial(experiment, directory, scratch))
    for model in engines:
        _check_ranks(model, ranks)
    zero = engines[0].config.zero_optimization
    nvme = zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path
    devices = find_devices(ranks, Path(nvme) if nvme else directory)
    if gpu_gb is not None:
        host = int(1e9 * (gpu_gb if host_gb is None else host_gb))
        devices = Devices("cuda", "GPU (given)", ranks, int(1e9 * gpu_gb), host, devices.disk_bytes)
    return Plan(ranks, engines, devices, list(_sum_engines(engines, ranks, devices.kind)))


def _check_ranks(model: ModelProfile, ranks: int) -> None:
    """Check values that depend on the trial's code: its models, and configurations in code."""
    if ranks % model.model_ranks:
        raise TrialError(
            f"world size: must be a multiple of {model.model_ranks}, the pipeline stages x "
            f"tensor-parallel ranks of the trial, got {ranks}"
        )
    replicas = ranks // model.model_ranks // model.config.sequence_parallel_size
    problem = model.config.batch_problem(replicas)
    if problem:
        raise TrialError(f"{model.config.source}: {problem}")


def _build_trial(experiment: ExperimentConfig, directory: Path, scratch: str) -> object:
    if experiment.trial_class is None:
        raise TrialError(
            f"entrypoint: must be module:Class to be planned, got {experiment.entrypoint!r}; "
            "a script's model cannot be found without running it"
        )
    ranks = experiment.resources.slots_per_trial
    rng = Random(experiment.reproducibility.experiment_seed)  # noqa: S311 - a sample, not a secret
    spec = RunSpec(
        experiment_id=0,
        trial_id=0,
        run_id=0,
        config=experiment.to_dict(),
        hparams=sample_hyperparameters(experiment.hyperparameters, rng),
        trial_seed=0,
        slots=ranks,
        model_dir=str(directory),
        run_dir=scratch,
        checkpoint_dir=scratch,
    )
    trial_class = load_trial_class(experiment.trial_class, directory, check_methods=False)
    length = experiment.searcher.full_length
    with trial_values(spec.hparams, length.batches if length else None):
        return trial_class(ZeroTrialContext(spec, PlannedRanks(ranks)))


def _sum_engines(
    engines: Sequence[ModelProfile], ranks: int, device: Device
) -> Iterator[MemoryEstimate]:
    """Add up the engines' estimates, for each stage and offload that all of them support."""
    first, *remaining = (
        {(e.stage, e.offload_optimizer, e.offload_param): e for e in estimates(m, ranks, device)}
        for m in engines
    )
    for choice, engine in first.items():
        if all(choice in other for other in remaining):
            group = [engine, *(other[choice] for other in remaining)]
            sums = {name: sum(getattr(e, name) for e in group) for name in _BYTES}
            yield replace(engine, world_size=ranks, **sums)


def estimates(model: ModelProfile, ranks: int, device: Device) -> Iterator[MemoryEstimate]:
    """Estimate every stage and offload for one engine of a trial.

    Pipeline stages and tensor-parallel ranks are counted as an even division of the model.

    Args:
        model: Sizes of the engine's model.
        ranks: World size.
        device: Device that trains.

    Raises:
        ConfigError: If the ranks cannot share the batch.
    """
    config, parts = model.config, model.model_ranks
    replicas = ranks // parts
    accumulate = config.data_types.grad_accum_dtype
    steps = config.batch_sizes(replicas).accumulation_steps
    if accumulate is None and config.sums_micro_batches(steps):
        accumulate = "fp32"
    width = 4 if config.dtype == "fp32" else 2
    shard = config.zero_optimization.shard_ranks or replicas
    for choice in every_choice(
        -(-model.parameters // parts),
        -(-model.largest_block // config.tensor_parallel.size),
        shard,
        config.dtype,
        optimizer=model.optimizer,
        grad_accum_dtype=accumulate,
        communication_data_type=config.communication_data_type,
        bucket_numel=partial(bucket_of, model, shard, device),
        kept_gathered=model.kept_gathered // parts,
        replicated=model.replicated // parts,
        device=device,
    ):
        if choice.stage == 3 and model.stages > 1:
            continue  # not supported by the engine
        frozen = width * -(-model.frozen // parts)
        if choice.stage == 3:
            replicated = width * (model.replicated_frozen // parts)
            frozen = replicated + (frozen - replicated) // shard
        location = {"none": "device", "cpu": "host", "nvme": "disk"}[choice.offload_param]
        yield replace(
            choice,
            world_size=ranks,
            parameters=choice.parameters + frozen,
            **{location: getattr(choice, location) + frozen},
        )


def bucket_of(
    model: ModelProfile, ranks: int, device: Device, stage: int, offload_optimizer: Place
) -> int:
    """Elements of the largest bucket that the engine would create; stage 3 has none.

    As in :func:`estimates`, each rank of a divided model has an even part of it.
    """
    zero = model.config.zero_optimization
    numel = -(-model.parameters // model.model_ranks)
    limit = choose_bucket_numel(
        zero, numel, stage=stage, offload_optimizer=offload_optimizer, device=device
    )
    tensor_ranks = model.config.tensor_parallel.size
    groups = [[-(-size // tensor_ranks) for size in group] for group in model.sizes]
    is_full = stage > 0 and model.optimizer in WHOLE
    by_stage = zip(*(_divide(group, model.stages) for group in groups), strict=True)
    buckets = (_largest_bucket(sizes, limit, ranks, whole_parameters=is_full) for sizes in by_stage)
    return max(buckets, default=0)


def _divide(sizes: Sequence[int], stages: int) -> list[list[int]]:
    """Divide parameters into consecutive runs of about equal size, one per pipeline stage."""
    runs: list[list[int]] = [[] for _ in range(stages)]
    total, start = max(sum(sizes), 1), 0
    for size in sizes:
        middle = start + size / 2
        runs[min(int(stages * middle / total), stages - 1)].append(size)
        start += size
    return runs


def find_devices(ranks: int, files: Path) -> Devices:
    """Find the memory of this machine that each rank may use.

    Args:
        ranks: World size; at most as many run here as there are GPUs, or all on CPU.
        files: Folder of offloaded states.

    Returns:
        Total memory, including what other processes use now.
    """
    memory = psutil.virtual_memory().total
    while not files.exists():
        files = files.parent
    disk = shutil.disk_usage(files).free
    kind: Device
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        used = min(ranks, count)
        properties = torch.cuda.get_device_properties(0)
        device, name, kind = properties.total_memory, properties.name, "cuda"
    else:
        count, used = os.cpu_count() or 1, ranks
        device, name, kind = memory // used, "CPU", "cpu"
    return Devices(kind, name, count, device, memory // used, disk // used)


def fits(choice: MemoryEstimate, devices: Devices) -> bool:
    """Return whether a rank has enough memory, with a fifth reserved for activations.

    Args:
        choice: Estimate for one rank.
        devices: Memory of one rank; on a CPU device and host are one memory.
    """
    if devices.kind == "cpu":
        room = choice.peak_device + choice.peak_host <= HEADROOM * devices.device_bytes
    else:
        room = choice.peak_device <= HEADROOM * devices.device_bytes
        room = room and choice.peak_host <= HEADROOM * devices.host_bytes
    return room and choice.disk <= devices.disk_bytes


def to_json(plan: Plan) -> str:
    """Write a plan as one JSON object; sizes are in bytes, counts in elements."""

    def of_choice(choice: MemoryEstimate | None) -> dict[str, Any] | None:
        if choice is None:
            return None
        peaks = {"peak_device": choice.peak_device, "peak_host": choice.peak_host}
        return {**asdict(choice), **peaks, "fits": fits(choice, plan.devices)}

    content = {
        "world_size": plan.world_size,
        "engines": [
            {
                "parameters": model.parameters,
                "frozen": model.frozen,
                "largest_block": model.largest_block,
                "precision": model.config.dtype,
                "optimizer": model.optimizer,
            }
            for model in plan.engines
        ],
        "devices": asdict(plan.devices),
        "choices": [of_choice(choice) for choice in plan.choices],
        "configured": of_choice(plan.configured),
        "recommended": of_choice(plan.recommended),
    }
    return json.dumps(content, indent=2)


def to_text(plan: Plan) -> str:
    """Write a plan as a table with a recommendation."""
    lines = []
    for model in plan.engines:
        frozen = f" and {model.frozen:,} frozen" if model.frozen else ""
        lines.append(
            f"model: {model.parameters:,} parameters{frozen}, largest block "
            f"{model.largest_block:,}; {model.config.dtype}, optimizer {model.optimizer}"
        )
        parts = model.model_ranks
        if parts > 1:
            lines.append(
                f"the model is divided evenly over {parts} ranks (pipeline stages x "
                f"tensor-parallel ranks), with {plan.world_size // parts} replica(s)"
            )
    devices = plan.devices
    lines.append(
        f"machine: {devices.count} x {devices.name}; "
        f"a rank may use {size_text(devices.device_bytes)}"
        + (f", and {size_text(devices.host_bytes)} of the host" if devices.kind == "cuda" else "")
    )
    lines += [f"bytes of each of {plan.world_size} rank(s), activations not counted:", ""]
    titles = ("on device", "incl. sums", "working set", "on host", "in files")
    rows = [("stage", "offload", *titles, "fits", "")]
    for choice in plan.choices:
        marks = {"as configured": plan.configured, "recommended": plan.recommended}
        rows.append(
            (
                str(choice.stage),
                choice.offload,
                size_text(choice.device),
                size_text(choice.accumulation) if choice.accumulation else "-",
                size_text(choice.working),
                size_text(choice.peak_host) if choice.peak_host else "-",
                size_text(choice.disk) if choice.disk else "-",
                "yes" if fits(choice, devices) else "no",
                ", ".join(mark for mark, marked in marks.items() if choice == marked),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = zip(row, widths, range(len(row)), strict=True)
        texts = [c.rjust(w) if 2 <= at <= 6 else c.ljust(w) for c, w, at in cells]
        lines.append("  ".join(texts).rstrip())
    return "\n".join([*lines, "", *_notes(plan), _advice(plan)])


def _notes(plan: Plan) -> Iterator[str]:
    if any(choice.accumulation for choice in plan.choices):
        yield "incl. sums: additional bytes of 16-bit gradients that are summed in fp32"
    if any(c.offload_optimizer == "nvme" and c.disk == c.moments for c in plan.choices):
        yield ("files contain only the moments if the weights are the master (fp32, stage 3)")


def _advice(plan: Plan) -> str:
    best = plan.recommended
    if best is None:
        return (
            "nothing fits: use more ranks (resources.slots_per_trial), a smaller model, or devices "
            "with more memory"
        )
    offload = "" if best.offload == "none" else f", offload {best.offload}"
    chosen = "the least communication among the choices that leave"
    if plan.world_size == 1:
        chosen = "the first row of this table that leaves"
    return (
        f"recommended: stage {best.stage}{offload}: {chosen} "
        f"{1 - HEADROOM:.0%} of the memory to activations"
    )


def _gigabytes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (size := float(text)) < 1e9:
            return size
    raise argparse.ArgumentTypeError(f"must be a number of GB above 0, got {text!r}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Arguments after the program's name; None: those of the process.

    Returns:
        0, or 2 for a mistake of the user.
    """
    parser = argparse.ArgumentParser(prog="zerolab plan", description=__doc__.split("\n\n")[0])
    parser.add_argument("file", type=Path, help="experiment file, e.g. examples/digits/smoke.yaml")
    parser.add_argument("--world-size", type=int, help="ranks; default resources.slots_per_trial")
    parser.add_argument("--tokens", help=argparse.SUPPRESS)
    parser.add_argument(
        "--gpu-memory", type=_gigabytes, metavar="GB", help="plan for GPUs with this much memory"
    )
    parser.add_argument(
        "--host-memory",
        type=_gigabytes,
        metavar="GB",
        help="host memory per rank, with --gpu-memory",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; sizes in bytes")
    options = parser.parse_args(arguments)
    if options.tokens is not None:
        parser.error(
            "--tokens: was removed with the list of layouts; choose pipeline stages and "
            "tensor-parallel ranks by docs/concepts/scaling.md, and leave the option out"
        )
    if options.host_memory is not None and options.gpu_memory is None:
        parser.error("--host-memory: needs --gpu-memory; set both")
    try:
        plan = make_plan(options.file, options.world_size, options.gpu_memory, options.host_memory)
    except (ZerolabError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201 - the command's answer
        return 2
    print(to_json(plan) if options.json else to_text(plan))  # noqa: T201 - the command's answer
    return 0


def _largest_bucket(
    sizes: Sequence[Sequence[int]], bucket_numel: int, ranks: int, *, whole_parameters: bool = False
) -> int:
    """Return the size of the largest bucket; a parameter is never split over two buckets.

    Args:
        sizes: Elements of each trained parameter, by optimizer group, in module order.
        bucket_numel: Limit from :func:`choose_bucket_numel`.
        ranks: N.
        whole_parameters: Whether the optimizer needs full parameters.

    Returns:
        Elements, padding included; 0 without parameters.
    """
    groups = [
        ParamGroup(
            [
                NamedParameter(
                    f"{index}.{position}", torch.nn.Parameter(torch.empty(size, device="meta"))
                )
                for position, size in enumerate(members)
            ]
        )
        for index, members in enumerate(sizes)
    ]
    buckets = build_buckets(
        groups,
        [named.name for group in groups for named in group.parameters],
        bucket_numel,
        ranks,
        None,
        whole_parameters=whole_parameters,
    )
    return max((bucket.numel for bucket in buckets), default=0)
