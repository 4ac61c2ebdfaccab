"""``python -m zerotrial.plan experiment.yaml``: what each ZeRO stage needs, before anything trains.

The trial's class is built as a run would build it, except that tensors have no memory (torch's meta
device) and that ``zerotrial.initialize`` only notes the model and its config. What is noted is put
into the formulas of :mod:`zerotrial.engine.memory` and set against this machine's devices.
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

from zerolab.config import sample_hyperparameters
from zerolab.config.engine.auto_values import determined_by
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.config.experiment.experiment_config import ExperimentConfig
from zerolab.config.experiment.hosts import with_ranks
from zerolab.config.experiment.model_source import FolderFiles
from zerolab.config.files import read_yaml
from zerolab.config.validation import check_experiment
from zerolab.contract.spec import RunSpec
from zerolab.errors import ConfigError, TrialError, ZerolabError
from zerolab.sizes import size_text
from zerotrial.context import ZeroTrialContext
from zerotrial.engine.flat.bucket_size import choose_bucket_numel, largest_bucket
from zerotrial.engine.memory import (
    WHOLE,
    Device,
    DTypeName,
    MemoryEstimate,
    Place,
    every_choice,
)
from zerotrial.plan.layouts import Layout, find_layouts, reason, recommend, table
from zerotrial.plan.noting import Noted, note_engines
from zerotrial.process.entrypoint import load_trial_class
from zerotrial.ranks import Distributed

__all__ = ["Choice", "Devices", "Plan", "find_devices", "fits", "main", "make_plan"]

HEADROOM = 0.8
"""Share of a device's memory that may be planned with; the rest is for activations."""

_CHOSEN = ("stage", "world_size", "offload_optimizer", "offload_param")
_BYTES = tuple(f.name for f in fields(MemoryEstimate) if f.name not in _CHOSEN)
"""What adds up over the engines of a trial."""


@dataclass(frozen=True)
class Devices:
    """What one rank may use on this machine."""

    kind: Device
    """What trains."""
    name: str
    count: int
    """GPUs, or CPU cores."""
    device_bytes: int
    """Of one rank's device; on CPU its share of the machine's memory."""
    host_bytes: int
    """One rank's share of the machine's memory."""
    disk_bytes: int
    """Free where files of offloaded states would lie."""


@dataclass(frozen=True)
class Choice:
    """A stage with an offload, and whether a rank has room for it."""

    estimate: MemoryEstimate
    fits: bool


@dataclass(frozen=True)
class Plan:
    """What was found."""

    world_size: int
    engines: Sequence[Noted]
    devices: Devices
    choices: Sequence[Choice]
    on_meta: bool
    """Whether the model was built without memory."""

    layouts: Sequence[Layout] | None = None
    """Those of all ranks that fit, for the first engine; None where neither a world size was asked
    for nor the trial has another axis than replicas."""

    tokens: int | None = None
    """Of one micro-batch, as asked."""

    batch_problem: str | None = None
    """Why all ranks as replicas, or the ranks as configured, cannot share the batch."""

    alone: Devices | None = None
    """What one rank of the choices may use; None: as one of all ranks. Fewer have more."""

    @property
    def replicas(self) -> int:
        """Ranks that the choices are for: all, or the most of a layout that share the batch."""
        return self.choices[0].estimate.world_size

    @property
    def recommended(self) -> Choice | None:
        """The first choice that fits, in the order of traffic and effort."""
        return next((choice for choice in self.choices if choice.fits), None)

    @property
    def recommended_layout(self) -> Layout | None:
        """Of all that fit; where samples have no length, of those with the most replicas."""
        found = self.layouts or ()
        if self.tokens is None:
            most = max((one.data for one in found), default=0)
            found = [one for one in found if one.data == most]
        return recommend(found)

    @property
    def configured(self) -> Choice | None:
        """The choice that the trial's config makes now; None if ranks are not replicas alone."""
        if _axes(self.engines[0]) != (1, 1) or self.replicas != self.world_size:
            return None
        zero = self.engines[0].config.zero_optimization
        states, shards = zero.offload_optimizer.device, zero.offload_param.device
        if shards != "none" and states == "none":
            states = "cpu"  # they are where the shards are
        now = (zero.stage, states, shards)
        for choice in self.choices:
            found = choice.estimate
            if (found.stage, found.offload_optimizer, found.offload_param) == now:
                return choice
        return None

    @property
    def configured_layout(self) -> Layout | None:
        """The layout that the trial asks for now; None if it does not fit."""
        noted = self.engines[0]
        stage = noted.config.zero_optimization.stage
        for one in self.layouts or ():
            if (one.pipe, one.tensor) == _axes(noted) and one.stage == (stage, 0)[one.data == 1]:
                return one
        return None


def _axes(noted: Noted) -> tuple[int, int]:
    """Pipeline stages, and ranks that have one model between them, as the trial asks for."""
    return noted.stages, noted.config.tensor_parallel.size


def make_plan(
    file: Path,
    world_size: int | None = None,
    tokens: int | None = None,
    gpu_gb: float | None = None,
    host_gb: float | None = None,
) -> Plan:
    """Read an experiment, build its model, and estimate every stage and offload.

    Args:
        file: The experiment file; the model's code lies beside it.
        world_size: Ranks; ``resources.slots_per_trial`` when left out, and no layouts then unless
            the trial has pipeline stages or cut matrices.
        tokens: Of one micro-batch in a rank's forward; its samples when left out.
        gpu_gb: Memory of a GPU that each rank would have elsewhere; this machine's devices when
            left out.
        host_gb: Memory of the host for each rank there; as much as the GPU's when left out.

    Returns:
        The plan.

    Raises:
        ZerolabError: If the experiment or its trial is not as it must be, or the batch cannot be
            shared in any layout of the ranks.
    """
    directory = file.resolve().parent
    experiment, unshared = _read(file, world_size)
    if experiment.backend != "zerolab":
        raise TrialError(
            f"backend: must be zerolab for a plan, got {experiment.backend!r}: the formulas are "
            "those of Zerolab's engine"
        )
    ranks = experiment.resources.slots_per_trial
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(directory):
        engines, on_meta = note_engines(lambda: _build_trial(experiment, directory, scratch))
    zero = engines[0].config.zero_optimization
    nvme = zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path
    files = Path(nvme) if nvme else directory
    devices = find_devices(ranks, files)
    if gpu_gb is not None:
        host = int(1e9 * (gpu_gb if host_gb is None else host_gb))
        devices = Devices(
            "cuda", "GPU, as asked", ranks, int(1e9 * gpu_gb), host, devices.disk_bytes
        )
    layouts, replicas, problem = None, ranks, None
    if world_size is not None or _axes(engines[0]) != (1, 1):
        config = engines[0].config
        samples = config.train_micro_batch_size_per_gpu or 1
        possible = list(find_layouts(engines[0], ranks, devices.kind, tokens or samples))
        if unshared is not None and not possible:
            raise unshared
        layouts = [one for one in possible if _has_room(one, devices)]
        replicas = max((one.data for one in possible), default=ranks)
        problem = _batch_problem(config, ranks, unshared)
    fewer = replicas != ranks and gpu_gb is None
    alone = find_devices(replicas, files) if fewer else devices
    found = _estimates(engines, replicas, devices.kind)
    choices = [Choice(each, fits(each, alone)) for each in found]
    return Plan(ranks, engines, devices, choices, on_meta, layouts, tokens, problem, alone)


def _read(file: Path, world_size: int | None) -> tuple[ExperimentConfig, ConfigError | None]:
    """Read an experiment, and why its ranks cannot share the batch where that alone is wrong.

    A number of ranks that is asked for can be divided otherwise than the file does.
    """
    content, model = dict(read_yaml(file)), FolderFiles(file.resolve().parent)
    if world_size is None:
        return check_experiment(content, model, str(file)), None
    content = with_ranks(content, world_size)
    try:
        return check_experiment(content, model, str(file)), None
    except ConfigError as error:
        try:
            return check_experiment(content, model, str(file), shared=False), error
        except ConfigError:
            raise error from None  # with all problems


def _batch_problem(config: EngineConfig, ranks: int, unshared: ConfigError | None) -> str | None:
    alone = config.batch_problem(ranks)
    if alone is not None:
        return f"not with {ranks} replicas: {alone}"
    return None if unshared is None else f"not as configured: {'; '.join(unshared.problems)}"


def _has_room(layout: Layout, devices: Devices) -> bool:
    """Whether a rank has room for its states, and for its activations beside them."""
    if not fits(layout.estimate, devices):
        return False
    host = layout.estimate.peak_host if devices.kind == "cpu" else 0
    return layout.estimate.peak_device + host + layout.activations <= devices.device_bytes


def _build_trial(experiment: ExperimentConfig, directory: Path, scratch: str) -> object:
    if experiment.trial_class is None:
        raise TrialError(
            f"entrypoint: must be module:Class to be planned, got {experiment.entrypoint!r}; "
            "a script's model cannot be found without running it"
        )
    rng = Random(experiment.reproducibility.experiment_seed)  # noqa: S311 - a sample, not a secret
    spec = RunSpec(
        experiment_id=0,
        trial_id=0,
        run_id=0,
        config=experiment.to_dict(),
        hparams=sample_hyperparameters(experiment.hyperparameters, rng),
        trial_seed=0,
        slots=1,
        model_dir=str(directory),
        run_dir=scratch,
        checkpoint_dir=scratch,
    )
    trial_class = load_trial_class(experiment.trial_class, directory)
    length = experiment.searcher.full_length
    with determined_by(spec.hparams, length.batches if length else None):
        return trial_class(ZeroTrialContext(spec, Distributed()))


def _estimates(engines: Sequence[Noted], ranks: int, device: Device) -> Iterator[MemoryEstimate]:
    """Every choice, all engines of the trial together."""
    for found in zip(*(_of_engine(noted, ranks, device) for noted in engines), strict=True):
        yield replace(found[0], **{name: sum(getattr(e, name) for e in found) for name in _BYTES})


def _of_engine(noted: Noted, ranks: int, device: Device) -> Iterator[MemoryEstimate]:
    config = noted.config
    precision: DTypeName = config.dtype
    accumulate = config.data_types.grad_accum_dtype
    if accumulate is None and config.sums_micro_batches(_accumulation(config, ranks)):
        accumulate = "fp32"
    width = 4 if precision == "fp32" else 2
    shard = config.zero_optimization.shard_ranks or ranks
    for found in every_choice(
        noted.parameters,
        noted.largest_block,
        shard,
        precision,
        optimizer=noted.optimizer,
        grad_accum_dtype=accumulate,
        communication_data_type=config.communication_data_type,
        bucket_numel=partial(_largest_bucket, noted, shard, device),
        kept_whole=noted.kept_whole,
        device=device,
    ):
        frozen = width * noted.frozen // (shard if found.stage == 3 else 1)
        place = {"none": "device", "cpu": "host", "nvme": "disk"}[found.offload_param]
        yield replace(
            found,
            world_size=ranks,
            parameters=found.parameters + frozen,
            **{place: getattr(found, place) + frozen},
        )


def _accumulation(config: EngineConfig, ranks: int) -> int:
    return 1 if config.batch_problem(ranks) else config.batch_sizes(ranks).accumulation_steps


def _largest_bucket(
    noted: Noted, ranks: int, device: Device, stage: int, offload_optimizer: Place
) -> int:
    """As the engine would cut them; stage 3 has none."""
    zero = noted.config.zero_optimization
    limit = choose_bucket_numel(
        zero, noted.parameters, stage=stage, offload_optimizer=offload_optimizer, device=device
    )
    whole = stage > 0 and noted.optimizer in WHOLE
    return largest_bucket(noted.sizes, limit, ranks, whole_parameters=whole)


def find_devices(ranks: int, files: Path) -> Devices:
    """Look at this machine as the ranks of a trial would share it.

    Args:
        ranks: Of the trial; as many run here as there are GPUs, or all on CPU.
        files: Where offloaded states would lie.

    Returns:
        Total memory, whoever uses it at the moment.
    """
    memory = psutil.virtual_memory().total
    while not files.exists():
        files = files.parent
    disk = shutil.disk_usage(files).free
    kind: Device
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        here = min(ranks, count)
        properties = torch.cuda.get_device_properties(0)
        device, name, kind = properties.total_memory, properties.name, "cuda"
    else:
        count, here = os.cpu_count() or 1, ranks
        device, name, kind = memory // here, "CPU", "cpu"
    return Devices(kind, name, count, device, memory // here, disk // here)


def fits(found: MemoryEstimate, devices: Devices) -> bool:
    """Whether a rank has room, with a fifth to spare for activations.

    Args:
        found: What it needs.
        devices: What it may use; on a CPU device and host are one memory.

    Returns:
        True if device, host and disk are all large enough.
    """
    if devices.kind == "cpu":
        room = found.peak_device + found.peak_host <= HEADROOM * devices.device_bytes
    else:
        room = found.peak_device <= HEADROOM * devices.device_bytes
        room = room and found.peak_host <= HEADROOM * devices.host_bytes
    return room and found.disk <= devices.disk_bytes


def to_json(plan: Plan) -> str:
    """Write a plan for programs.

    Args:
        plan: What was found; sizes are in bytes, counts in elements.

    Returns:
        One JSON object.
    """

    def of_choice(choice: Choice | None) -> dict[str, Any] | None:
        if choice is None:
            return None
        found = choice.estimate
        peaks = {"peak_device": found.peak_device, "peak_host": found.peak_host}
        return {**asdict(found), **peaks, "fits": choice.fits}

    best, now = plan.recommended_layout, plan.configured_layout
    content = {
        "world_size": plan.world_size,
        "engines": [
            {
                "parameters": noted.parameters,
                "frozen": noted.frozen,
                "largest_block": noted.largest_block,
                "precision": noted.config.dtype,
                "optimizer": noted.optimizer,
            }
            for noted in plan.engines
        ],
        "devices": asdict(plan.devices),
        "choices": [of_choice(choice) for choice in plan.choices],
        "configured": of_choice(plan.configured),
        "recommended": of_choice(plan.recommended),
        "batch_problem": plan.batch_problem,
        "layouts": [layout.to_dict() for layout in plan.layouts or ()],
        "recommended_layout": None if best is None else best.to_dict(),
        "configured_layout": None if now is None else now.to_dict(),
    }
    return json.dumps(content, indent=2)


def to_text(plan: Plan) -> str:
    """Write a plan for people.

    Args:
        plan: What was found.

    Returns:
        What was found, a table, and a recommendation.
    """
    lines = []
    for noted in plan.engines:
        frozen = f" and {noted.frozen:,} frozen" if noted.frozen else ""
        lines.append(
            f"model: {noted.parameters:,} parameters{frozen}, largest block "
            f"{noted.largest_block:,}; {noted.config.dtype}, optimizer {noted.optimizer}"
        )
    place = plan.devices
    lines.append(
        f"machine: {place.count} x {place.name}; a rank may use {size_text(place.device_bytes)}"
        + (f", and {size_text(place.host_bytes)} of the host" if place.kind == "cuda" else "")
    )
    if plan.batch_problem is not None:
        lines.append(plan.batch_problem)
    ranks = f"{plan.replicas} rank(s){_alone(plan)}"
    if plan.replicas != plan.world_size:
        ranks += f" (of {plan.world_size}, the most that can share the batch"
        if plan.alone is not None and plan.alone.device_bytes != place.device_bytes:
            ranks += f"; by themselves each may use {size_text(plan.alone.device_bytes)}"
        ranks += ")"
    lines += [f"bytes of each of {ranks}, activations not counted:", ""]
    titles = ("on device", "of it sums", "working set", "on host", "in files")
    rows = [("stage", "offload", *titles, "fits", "")]
    for choice in plan.choices:
        found, marks = choice.estimate, []
        if choice == plan.configured:
            marks.append("as configured")
        if choice == plan.recommended:
            marks.append("recommended")
        rows.append(
            (
                str(found.stage),
                found.offload,
                size_text(found.device),
                size_text(found.accumulation) if found.accumulation else "-",
                size_text(found.working),
                size_text(found.peak_host) if found.peak_host else "-",
                size_text(found.disk) if found.disk else "-",
                "yes" if choice.fits else "no",
                ", ".join(marks),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = zip(row, widths, range(len(row)), strict=True)
        texts = [c.rjust(w) if 2 <= at <= 6 else c.ljust(w) for c, w, at in cells]
        lines.append("  ".join(texts).rstrip())
    lines += ["", *_notes(plan), _advice(plan), *_layout_lines(plan)]
    return "\n".join(lines)


def _layout_lines(plan: Plan) -> list[str]:
    """The layouts of all ranks that fit."""
    if plan.world_size == 1 or plan.layouts is None:
        return []
    noted, best = plan.engines[0], plan.recommended_layout
    config = noted.config
    samples = config.train_micro_batch_size_per_gpu or 1
    counted = f"activations are those of a transformer, for {plan.tokens or samples} token(s) a "
    counted += "micro-batch"
    if plan.tokens is None:
        counted += "; say samples x length with --tokens, which pipeline stages and cut matrices "
        counted += "are compared by"
    if not config.activation_checkpointing.active and not noted.is_pipeline:
        counted += "; activation_checkpointing keeps a small part of them"
    if not noted.interval and any(one.pipe > 1 for one in plan.layouts):
        counted += "; with pipeline stages pipeline.activation_checkpoint_interval keeps a small "
        counted += "part of them, and activation_checkpointing alone has no effect"
    if best is None:
        return ["", f"no layout of {plan.world_size} ranks fits with its activations: {counted}"]
    width = 4 if config.dtype == "fp32" else 2
    return [
        "",
        f"layouts of {plan.world_size} ranks that fit; bytes that a rank moves in a step, by axis:",
        "",
        *table(plan.layouts, best, width, plan.configured_layout),
        "",
        *_missing(plan),
        counted,
        "an idle share (bubble) counts as so much more traffic",
        *([reason(best, plan.layouts, width)] if plan.tokens else []),
    ]


def _missing(plan: Plan) -> list[str]:
    """Say it if what the trial asks for is not in the table."""
    if plan.configured_layout is not None:
        return []
    pipe, tensor = _axes(plan.engines[0])
    data, rest = divmod(plan.world_size, pipe * tensor)
    asked = f"as configured, {pipe} pipeline stage(s) and matrices cut over {tensor} rank(s)"
    if rest:
        return [f"{asked}: {plan.world_size} ranks are no multiple of {pipe} x {tensor}"]
    why = "it does not fit, or model and batch cannot be divided so"
    return [f"{asked}: {pipe} x {data} x {tensor} is not in the table: {why}"]


def _alone(plan: Plan) -> str:
    """Tell the table of replicas from that of layouts, where there are two."""
    return "" if plan.layouts is None or plan.world_size == 1 else ", with replicas alone"


def _notes(plan: Plan) -> list[str]:
    """What the table does not say by itself."""
    found = [choice.estimate for choice in plan.choices]
    notes = []
    if any(each.accumulation for each in found):
        notes.append("of it sums: what fp32 sums take beyond gradients of 16 bits")
    if any(each.offload_optimizer == "nvme" and each.disk == each.moments for each in found):
        notes.append(
            "in files are the moments alone where the weights are their own master (fp32, stage 3)"
        )
    return notes


def _advice(plan: Plan) -> str:
    best = plan.recommended
    if best is None:
        return (
            "nothing fits: use more ranks (resources.slots_per_trial), a smaller model, or devices "
            "with more memory"
        )
    offload = "" if best.estimate.offload == "none" else f", offload {best.estimate.offload}"
    chosen = "the least communication among what leaves"
    if plan.world_size == 1:
        chosen = "the first in this table that leaves"
    return (
        f"recommended{_alone(plan)}: stage {best.estimate.stage}{offload}: {chosen} "
        f"{1 - HEADROOM:.0%} of the memory to activations"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: After the program's name; of the process when left out.

    Returns:
        0, or 2 for the user's mistake.
    """
    parser = argparse.ArgumentParser(prog="zerolab plan", description=__doc__.split("\n\n")[0])
    parser.add_argument("file", type=Path, help="experiment file, e.g. examples/digits/smoke.yaml")
    parser.add_argument("--world-size", type=int, help="ranks; lists the layouts of so many, too")
    parser.add_argument("--tokens", type=int, help="of one micro-batch: samples x length")
    parser.add_argument(
        "--gpu-memory", type=float, metavar="GB", help="plan for GPUs that are not here, of so much"
    )
    parser.add_argument(
        "--host-memory", type=float, metavar="GB", help="with it: of the host, for each rank"
    )
    parser.add_argument("--json", action="store_true", help="for programs; sizes in bytes")
    options = parser.parse_args(arguments)
    try:
        plan = make_plan(
            options.file,
            options.world_size,
            options.tokens,
            options.gpu_memory,
            options.host_memory,
        )
    except (ZerolabError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201 - the command's answer
        return 2
    print(to_json(plan) if options.json else to_text(plan))  # noqa: T201 - the command's answer
    return 0
