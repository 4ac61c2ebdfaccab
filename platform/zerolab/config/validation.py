"""Validation of an experiment with its engine file, before anything starts."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from zerolab.config.engine.batch import BatchSizes, keep_batch
from zerolab.config.engine.dialect import dialect, read_engine_text, read_source
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.config.engine.reader import EngineFile, parse_engine_config
from zerolab.config.engine.resolved_config import Entry, format_entries, resolve
from zerolab.config.experiment.entrypoint import parse_entrypoint
from zerolab.config.experiment.experiment_config import (
    ExperimentConfig,
    ExperimentFile,
    parse_experiment,
)
from zerolab.config.experiment.layers import Layer, merge_layers, origin_of, read_layers
from zerolab.config.experiment.model_files import FolderFiles, ModelFiles
from zerolab.config.experiment.resources import (
    ResourcesConfig,
    with_elastic_counts,
)
from zerolab.config.experiment.run_spec import variables_of
from zerolab.config.files import experiment_file
from zerolab.contract.flatten import flatten_hparams
from zerolab.contract.secrets import mask_secrets
from zerolab.contract.spec import Command
from zerolab.errors import ConfigError
from zerolab.registry import PARTS
from zerolab.schema.hyperparameters import extremes, space_problems, space_warnings
from zerolab.schema.json_values import json_value_problems, key_problems
from zerolab.schema.section import hints_of, keys_of, suggest
from zerolab.schema.space import Space, misplaced_specs

__all__ = ["check_experiment", "check_file", "engine_files", "with_ranks"]

_HOST_KEYS = frozenset({"hostfile", "include", "exclude", "ssh_config", "hosts"})
_MAX_RANKS = 4096
_SHOWN_SIZES = 16
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def check_experiment(
    content: Mapping[str, Any],
    model: ModelFiles,
    source: str = "experiment",
    *,
    strict: bool = False,
) -> ExperimentConfig:
    """Check an experiment file, its entrypoint, and its engine file.

    The model's source is read, never imported. Searched values are checked at the ends of their
    ranges, and every choice once.

    Args:
        content: The experiment file.
        model: The files of the model directory.
        source: The experiment file's name, for messages.
        strict: Read the engine file without normalization.

    Returns:
        The configuration, with all defaults.

    Raises:
        ConfigError: With every problem of both files.

    Example:
        >>> from pathlib import Path
        >>> from zerolab.config.experiment.model_files import FolderFiles
        >>> size = Path("train.py").write_text("print('training')")
        >>> searcher = {"name": "single", "metric": "loss"}
        >>> content = {"entrypoint": "python train.py", "searcher": searcher}
        >>> zerolab.config.check_experiment(content, FolderFiles(Path("."))).name
        'experiment'
    """
    if not isinstance(content, Mapping):
        problem = f"file: must be a mapping of keys to values, got {type(content).__name__}"
        raise ConfigError(source, [problem])
    json_problems = json_value_problems(content)
    if json_problems:
        raise ConfigError(source, json_problems)
    _refuse_engine_file(content, source)
    parsed = parse_experiment(content)
    problems = list(parsed.problems)
    resources = parsed.config.resources if parsed.config is not None else None
    try:
        if resources is not None and resources.hostfile is not None:
            if problem := PARTS.problem("hostfile"):
                raise ConfigError("resources", [f"resources.hostfile: {problem}"])
            resources = PARTS["hostfile"].with_hosts(resources, model)
    except ConfigError as error:
        problems += error.problems
    slots = _slots(content, resources)
    space = content.get("hyperparameters")
    problems += key_problems(space, "hyperparameters")
    valid_counts: list[int] | None = None
    if isinstance(space, Mapping) and not space_problems(space):
        problems += misplaced_specs(space)
        batches = _max_batches(parsed.config)
        is_command = _is_command(parsed.config, content)
        for _, engine in engine_files(space, model, batches, strict=strict):
            # A Trainer fills them from its own arguments.
            open_keys = engine.left_open if is_command else []
            problems += [line for line in engine.problems if line not in open_keys]
            problems += _batch_problems(engine, slots)
            problems += _schedule_problems(engine, slots)
            counts = _batch_keeping_counts(engine, slots)
            if valid_counts is not None and counts is not None:
                counts = [count for count in valid_counts if count in counts]
            valid_counts = counts
    problems += _entrypoint_problems(content, parsed, resources, model)
    problems = list(dict.fromkeys(problems))
    if problems or parsed.config is None or resources is None:
        raise ConfigError(source, problems)
    try:
        elastic = with_elastic_counts(resources, valid_counts)
    except ValueError as error:
        raise ConfigError(source, [str(error)]) from None
    filled = resources.model_copy(update={"elastic": elastic})
    return parsed.config.model_copy(update={"resources": filled})


def _is_command(config: ExperimentConfig | None, content: Mapping[str, Any]) -> bool:
    """Return whether the entrypoint is a command, even if the file has errors."""
    if config is not None:
        return config.trial_class is None
    entrypoint = content.get("entrypoint")
    arguments = entrypoint.split() if isinstance(entrypoint, str) else entrypoint
    return isinstance(arguments, list) and len(arguments) > 1


def _has_own_python(content: Mapping[str, Any]) -> bool:
    """Return whether the experiment names the Python interpreter of its trials."""
    environment = content.get("environment")
    return isinstance(environment, Mapping) and bool(environment.get("python"))


def _batch_keeping_counts(engine: EngineFile, slots: int | None) -> list[int] | None:
    """Return the numbers of ranks that keep a trial's batch, or None if unknown."""
    config = engine.config
    if config is None or slots is None or engine.problems or _batch_problems(engine, slots):
        return None
    planned = config.batch_sizes(config.data_parallel_size(slots))
    return [
        count
        for count in range(1, slots + 1)
        if config.layout_problem(count) is None
        and not isinstance(sizes := keep_batch(planned, config.data_parallel_size(count)), str)
        and not _pipeline_problems(config, sizes)
    ]


def _environment(config: ExperimentConfig | None) -> dict[str, str]:
    """Return the variables of a trial, for any kind of slot."""
    variables = variables_of(config) if config is not None else {}
    return {name: value for by_name in variables.values() for name, value in by_name.items()}


def _entrypoint_problems(
    content: Mapping[str, Any],
    file: ExperimentFile,
    resources: ResourcesConfig | None,
    model: ModelFiles,
) -> list[str]:
    problems: list[str] = []
    entrypoint = None
    if file.config is not None and "entrypoint" not in file.bad:
        entrypoint = parse_entrypoint(file.config.entrypoint)
        if isinstance(entrypoint, Command):
            problems += dialect().argument_problems(file.config.hyperparameters, model)
    if checks := PARTS.find("source_checks"):
        problems += checks.problems_of_source(
            content.get("entrypoint"), entrypoint, model, _environment(file.config),
            resources=resources, same_python=not _has_own_python(content),
        )  # fmt: skip
    return problems


def _refuse_engine_file(content: Mapping[str, Any], source: str) -> None:
    """Reject an engine file, with one line instead of one for each key.

    Raises:
        ConfigError: If it has keys of an engine file, and none of an experiment.
    """
    keys = [key for key in keys_of(EngineConfig) if key in content]
    if keys and not any(key in content for key in keys_of(ExperimentConfig)):
        problem = (
            f"file: must be an experiment file, got an engine file (it has {', '.join(keys[:3])}); "
            "name it in an experiment file: hyperparameters: {deepspeed_config: "
            f"{Path(source).name}}}"
        )
        raise ConfigError(source, [problem])


def engine_files(
    space: Mapping[str, Any],
    model: ModelFiles,
    batches: int | None = None,
    *,
    strict: bool = False,
) -> Iterator[tuple[str, EngineFile]]:
    """Read the engine file of each extreme sample of a space, overrides merged.

    Args:
        space: An experiment's hyperparameters, without mistakes.
        model: The files of the model directory.
        batches: Maximum length of a trial in optimizer steps.
        strict: Skip normalization.

    Yields:
        The engine file's name (empty if the experiment has its content) and the file; its problems
        begin with that name.
    """
    for sample in extremes(space):
        base = sample.get("deepspeed_config")
        overrides = sample.get("overwrite_deepspeed_args") or {}
        if base is None:
            continue  # the trial names its engine file in its own code
        if not isinstance(overrides, Mapping):
            text = f"must be a mapping of keys to values, got {overrides!r}"
            problem = f"hyperparameters.overwrite_deepspeed_args: {text}"
            yield "", EngineFile(None, [problem], frozenset())
            overrides = {}
        read: Callable[..., EngineFile] = partial(
            parse_engine_config,
            overrides=overrides,
            hyperparameters=sample,
            batches=batches,
            strict=strict,
        )
        yield _read_engine(base, model, read, strict=strict)


def _read_engine(
    base: Any, model: ModelFiles, read: Callable[..., EngineFile], *, strict: bool
) -> tuple[str, EngineFile]:
    key = "hyperparameters.deepspeed_config"
    if isinstance(base, Mapping):
        engine = read(base, key)
        return "", _with_prefix(engine, f"{key}.")
    if not isinstance(base, str):
        text = f"{key}: must be the path of a JSON file or its content, got {base!r}"
        return "", EngineFile(None, [text], frozenset())
    path = PurePosixPath(base)
    if path.is_absolute() or ".." in path.parts:
        text = f"{key}: must be a path inside the model directory, got {base!r}"
        return base, EngineFile(None, [text], frozenset())
    raw = model.read(str(path))
    if raw is None:
        near = suggest(base, [name for name in model.names() if name.endswith(".json")])
        text = f"{key}: must name a file in the model directory, got {base!r}: no such file{near}"
        return base, EngineFile(None, [text], frozenset())
    try:
        content, changes = read_engine_text(raw, base, strict=strict)
    except ConfigError as error:
        engine = EngineFile(None, error.problems, frozenset())
    else:
        engine = read(content, base)
        engine = replace(engine, changes=[*changes, *engine.changes])
    return base, _with_prefix(engine, f"{base}: ")


def _with_prefix(engine: EngineFile, prefix: str) -> EngineFile:
    problems, left_open = (
        [prefix + line for line in lines] for lines in (engine.problems, engine.left_open)
    )
    return replace(engine, problems=problems, left_open=left_open, prefix=prefix)


def _max_batches(config: ExperimentConfig | None) -> int | None:
    """Return a trial's maximum length in batches, or None if it has another unit."""
    length = config.searcher.full_length if config is not None else None
    if length is None:
        return None
    return length.batches or None


def _slots(content: Mapping[str, Any], resources: ResourcesConfig | None) -> int | None:
    """Return the ranks of a trial, or None if the file's value is invalid."""
    if resources is not None:
        return resources.slots_per_trial
    resources_block = content.get("resources", {})
    slots = (
        resources_block.get("slots_per_trial", 1) if isinstance(resources_block, Mapping) else None
    )
    return slots if type(slots) is int and slots > 0 else None


_SET_STAGES = "; pipeline stages are not data-parallel replicas: set pipeline.stages"


def _batch_problems(engine: EngineFile, slots: int | None) -> list[str]:
    config = engine.config
    if config is None or slots is None or engine.bad & set(_BATCH_KEYS):
        return []
    problem = config.layout_problem(slots)
    if problem is None:
        problem = config.batch_problem(config.data_parallel_size(slots))
        if problem and slots > 1 and "pipeline" in config.model_fields_set:
            problem += "" if config.pipeline.stages else _SET_STAGES
    return [engine.prefix + problem] if problem else []


def _schedule_problems(engine: EngineFile, slots: int | None) -> list[str]:
    """Return why a pipeline's schedule cannot run the micro-batches of these ranks."""
    config = engine.config
    if config is None or slots is None or engine.problems or _batch_problems(engine, slots):
        return []
    sizes = config.batch_sizes(config.data_parallel_size(slots))
    return [engine.prefix + problem for problem in _pipeline_problems(config, sizes)]


def _pipeline_problems(config: EngineConfig, sizes: BatchSizes) -> list[str]:
    stages = config.pipeline.stages or 1
    rules = PARTS.find("pipeline_rules") if stages > 1 else None
    if rules is None:
        return []
    problems: list[str] = rules.schedule_problems(
        config.pipeline.schedule, stages, sizes.accumulation_steps
    )
    return problems


def check_file(
    path: str | PathLike[str],
    world_size: int | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
    overrides: Sequence[Layer] = (),
    *,
    strict: bool = False,
    torch: str | None = None,
    full: bool = True,
) -> str:
    """Check an experiment file or an engine file, and return a report.

    Args:
        path: An experiment file (``.yaml``, ``.yml``) or an engine file (JSON).
        world_size: Ranks; by default ``slots_per_trial`` of an experiment, else the ranks that
            share one model.
        hyperparameters: Values for ``"auto"`` in an engine file; an experiment has its own.
        overrides: Merged over the file.
        strict: Read the engine file without normalization.
        torch: Version of torch that will train; keys that need a newer one are problems.
        full: Include defaults and derived values.

    Returns:
        The changes of normalization and the resolved engine configuration, line by line, with the
        origin of every value.

    Raises:
        ConfigError: With all problems.

    Example:
        >>> from pathlib import Path
        >>> size = Path("ds_config.json").write_text('{"train_batch_size": 8}')
        >>> print(zerolab.config.check_file("ds_config.json", world_size=2).splitlines()[0])
        ds_config.json: ok for 2 data-parallel rank(s)
    """
    path = experiment_file(Path(path))
    if path.suffix.lower() in (".yaml", ".yml"):
        if hyperparameters is not None:
            problem = (
                "hyperparameters: must be given only with an engine file; an experiment has its own"
            )
            raise ConfigError(str(path), [problem])
        return _check_experiment_file(
            path, world_size, overrides, strict=strict, torch=torch, full=full
        )
    content, changes = read_source(path, strict=strict)
    auto_values = {} if hyperparameters is None else hyperparameters
    engine = parse_engine_config(
        content,
        str(path),
        overrides=merge_layers(overrides),
        hyperparameters=auto_values,
        strict=strict,
    )
    open_keys = engine.left_open if hyperparameters is None else []
    problems = [line for line in engine.problems if line not in open_keys]
    if not problems and open_keys:
        keys = ", ".join(line.partition(":")[0] for line in open_keys)
        return (
            f"{path}: ok; 'auto' of {keys} is filled in by the script's arguments (for example "
            "transformers' Trainer); --hyperparameters FILE checks the values"
        )
    valid_counts = _valid_world_sizes(engine) if world_size is None else [world_size]
    model_ranks = 1 if engine.config is None else engine.config.model_parallel_size
    ranks = valid_counts[0] if valid_counts else model_ranks
    problems += _batch_problems(engine, ranks)
    if world_size is not None:
        problems += _schedule_problems(engine, ranks)
    if engine.config is not None:
        problems += _torch_problems(engine.config, torch)
    if problems or engine.config is None:
        raise ConfigError(str(path), problems)
    text = _report(str(path), engine.config, [*changes, *engine.changes], ranks, full=full)
    return text if world_size is not None else f"{text}\n  {_sizes_text(valid_counts)}"


def _valid_world_sizes(engine: EngineFile) -> list[int]:
    """Return the numbers of ranks, up to a limit, whose batch and layout the file allows."""
    if engine.config is None or engine.problems:
        return []
    model_ranks = engine.config.model_parallel_size
    sizes = range(model_ranks, _MAX_RANKS + 1, model_ranks)
    return [ranks for ranks in sizes if not _batch_problems(engine, ranks)]


def _torch_problems(config: EngineConfig, torch: str | None) -> list[str]:
    rules = PARTS.find("torch_versions") if torch is not None else None
    return rules.torch_problems(config, torch) if rules else []


def _sizes_text(valid_counts: Sequence[int]) -> str:
    steps = {larger - smaller for smaller, larger in itertools.pairwise(valid_counts)}
    if len(valid_counts) > _SHOWN_SIZES and len(steps) == 1:
        (step,) = steps
        shown = "any" if step == 1 else f"every multiple of {step}"
    else:
        ellipsis = ", ..." if len(valid_counts) > _SHOWN_SIZES else ""
        shown = ", ".join(map(str, valid_counts[:_SHOWN_SIZES])) + ellipsis
    return f"world sizes that fit: {shown} (--world-size N checks one)"


def _check_experiment_file(
    path: Path,
    world_size: int | None,
    overrides: Sequence[Layer],
    *,
    strict: bool,
    torch: str | None,
    full: bool,
) -> str:
    layers = [*read_layers(path), *overrides]
    content = merge_layers(layers)
    model = FolderFiles(path.parent)
    if world_size is not None:
        content = with_ranks(content, world_size)
    config = check_experiment(content, model, str(path), strict=strict)
    parts = [_experiment_report(str(path), content, config)]
    if full:
        parts[0] += "".join(f"\n  {line}" for line in _settings(config, layers))
    slots = config.resources.slots_per_trial
    checked_names = set()
    batches = _max_batches(config)
    searched = _searched_keys(config.hyperparameters)
    for name, engine in engine_files(config.hyperparameters, model, batches, strict=strict):
        if name in checked_names:
            continue
        checked_names.add(name)
        label = name or "hyperparameters.deepspeed_config"
        if engine.left_open:
            parts.append(f"{label}: ok; each 'auto' without a value is set by the script")
        elif engine.config is not None:
            if too_old := _torch_problems(engine.config, torch):
                raise ConfigError(str(path), [f"{label}: {problem}" for problem in too_old])
            parts.append(_report(label, engine.config, engine.changes, slots, searched, full=full))
    return "\n\n".join(parts)


def _is_informative(entry: Entry) -> bool:
    """Return whether a setting is in the file, or a batch size that follows from the file."""
    key, _, origin = entry
    is_derived = origin.startswith("derived") and ": file" not in origin
    return origin != "default" and (not is_derived or key in _BATCH_KEYS)


def with_ranks(content: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return an experiment file with another number of ranks, on any machines.

    Args:
        content: The file; its block ``resources`` may be missing.
        ranks: Replacement of ``slots_per_trial``, or of the hostfile's slots.
    """
    resources = content.get("resources") or {}
    if not isinstance(resources, Mapping):
        return dict(content)  # the check of the file reports this
    other_keys = {key: value for key, value in resources.items() if key not in _HOST_KEYS}
    return {**content, "resources": {**other_keys, "slots_per_trial": ranks}}


def _experiment_report(source: str, content: Mapping[str, Any], config: ExperimentConfig) -> str:
    searcher = config.searcher
    length = searcher.full_length
    until = f", {length.count} {length.unit} each" if length else ""
    lines = [
        f"{source}: ok",
        f"  {config.name}: {searcher.outline(config.hyperparameters)}{until}, "
        f"{config.resources.slots_per_trial} slot(s) a trial",
    ]
    lines += [f"  warning: {line}" for line in space_warnings(config.hyperparameters)]
    for key, reason in hints_of(ExperimentConfig).items():
        value: Any = content
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            lines.append(f"  {key} = {value}  (hint: {reason})")
    return "\n".join(lines)


def _settings(config: ExperimentConfig, layers: Sequence[Layer]) -> list[str]:
    """Return a line for each setting of an experiment, with its origin; secrets are masked."""
    values = flatten_hparams(mask_secrets(config.to_dict()))
    shown = {layers[0].origin: "file"} if len(layers) == 1 else {}
    entries = [
        (key, value, shown.get(origin, origin))
        for key, value in values.items()
        if not key.startswith(_ENGINE_BLOCKS)
        for origin in [origin_of(key, layers) or "default"]
    ]
    return format_entries(entries).splitlines()


_ENGINE_BLOCKS = ("hyperparameters.deepspeed_config.", "hyperparameters.overwrite_deepspeed_args.")


def _searched_keys(space: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of the engine file that a search varies, and which value is reported."""
    searched = {}
    for dimension in Space(space).dimensions:
        block, _, key = dimension.name.partition(".")
        if block in ("deepspeed_config", "overwrite_deepspeed_args") and key:
            shown = "first" if dimension.kind == "categorical" else "lowest"
            searched[key] = f"{shown} of the searched values"
    return searched


def _report(
    source: str,
    config: EngineConfig,
    changes: list[str],
    world_size: int,
    searched: Mapping[str, str] = MappingProxyType({}),
    *,
    full: bool,
) -> str:
    replicas = config.data_parallel_size(world_size)
    entries = [
        (key, value, f"{origin}: {searched[key]}")
        if origin in ("file", "override") and key in searched
        else (key, value, origin)
        for key, value, origin in resolve(config, replicas)
    ]
    if not full:
        entries = [entry for entry in entries if _is_informative(entry)]
    text = format_entries(entries)
    lines = [f"changed: {change}" for change in changes] + text.splitlines()
    indented = "".join(f"\n  {line}" for line in lines)
    model_ranks, stages = config.tensor_parallel.size, config.pipeline.stages or 1
    factors = f" x {model_ranks} tensor-parallel rank(s)" if model_ranks > 1 else ""
    factors += f" x {stages} pipeline stage(s)" if stages > 1 else ""
    return f"{source}: ok for {replicas} data-parallel rank(s){factors}{indented}"
