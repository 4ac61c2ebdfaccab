"""Subject of the tuning: an experiment, or a script with an engine file."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

import msgspec

from zerolab.config.engine.dialect import dialect, read_source
from zerolab.config.experiment.layers import read_experiment
from zerolab.config.experiment.model_files import FolderFiles
from zerolab.config.experiment.run_spec import run_spec_fields
from zerolab.config.merging import merge
from zerolab.config.validation import check_experiment
from zerolab.contract.spec import Command, FitSpec, LengthSpec, RunSpec
from zerolab.errors import ConfigError
from zerolab.files import write_json
from zerolab.schema.hyperparameters import sample_hyperparameters

__all__ = ["ExperimentSubject", "ScriptSubject", "Subject", "with_overrides"]


class Subject(Protocol):
    """Something that can be run with other engine settings."""

    source: str
    """Its file, for messages."""
    content: Mapping[str, Any]
    """Its engine file."""
    override_engine: bool
    """Whether the engine has to merge the overrides, because no file or argument does."""
    ranks: int | None
    """Ranks that it asks for; None for all slots."""
    overrides_key: str
    """Location of its overrides, for messages."""
    forks: bool
    """Whether its ranks may be forked from a process that has imported torch."""

    def run_spec(self, run_dir: Path, ranks: int, overrides: Mapping[str, Any]) -> RunSpec:
        """Return the run with overrides.

        Args:
            run_dir: Directory of the run.
            ranks: Number of ranks.
            overrides: Keys of the engine file; empty for none.
        """
        ...

    def fingerprint(self) -> Any:
        """Return what determines its results, apart from its code."""
        ...


def with_overrides(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge overrides into an engine file, and drop keys that have no meaning in a tuned one.

    Args:
        content: The file.
        overrides: Keys that a candidate sets.
    """
    merged = merge(content, overrides)
    merged.pop("autotuning", None)
    zero = merged.get("zero_optimization", {})
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, {}).get("device") == "none":
            zero.pop(key)
    if merged.get("activation_checkpointing") == {"enabled": False}:
        merged.pop("activation_checkpointing")
    return merged


@dataclass
class ExperimentSubject:
    """An experiment file; its trials get overrides as hyperparameters.

    Args:
        file: The experiment file.

    Raises:
        ConfigError: With all problems of the file.
    """

    file: Path
    override_engine: bool = field(default=False, init=False)
    overrides_key: str = field(default="hyperparameters.overwrite_deepspeed_args", init=False)
    forks: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.source = str(self.file)
        self._directory = self.file.resolve().parent
        self._config = check_experiment(
            read_experiment(self.file), FolderFiles(self._directory), self.source
        )
        if self._config.resources.hosts:
            problem = "resources.hostfile: must be left out, as candidates run on this machine"
            raise ConfigError(self.source, [problem])
        self.forks = self._config.trial_class is not None and not self._config.environment.python
        self.ranks: int | None = self._config.resources.slots_per_trial
        random = Random(self._config.reproducibility.experiment_seed)  # noqa: S311 - a sample
        self._hparams = sample_hyperparameters(self._config.hyperparameters, random)
        base = self._hparams.get("deepspeed_config")
        if base is None:
            problem = (
                "hyperparameters.deepspeed_config: is missing; name the engine file there, and "
                "merge hyperparameters.overwrite_deepspeed_args into it (docs/how_to/autotune.md)"
            )
            raise ConfigError(self.source, [problem])
        source = base if isinstance(base, Mapping) else self._directory / base
        raw, _ = read_source(source)
        self._overrides = self._hparams.get("overwrite_deepspeed_args") or {}
        normalized, _ = dialect().normalize(raw, str(base))
        self.content: Mapping[str, Any] = merge(normalized, self._overrides)

    def run_spec(self, run_dir: Path, ranks: int, overrides: Mapping[str, Any]) -> RunSpec:
        """Return the run with overrides, without validations and checkpoints."""
        fields = run_spec_fields(self._config)
        fit: FitSpec = fields["fit"]
        hparams = self._hparams
        if overrides:
            together = merge(self._overrides, overrides)
            hparams = {**hparams, "overwrite_deepspeed_args": together}
        fields["fit"] = msgspec.structs.replace(
            fit,
            max_length=LengthSpec("batches", 1_000_000),
            validate_at=(),
            validation_period=None,
            checkpoint_period=None,
            checkpoint_policy="none",
            initial_validation=False,
        )
        return RunSpec(
            experiment_id=0,
            trial_id=0,
            run_id=0,
            config=self._config.to_dict(),
            hparams=hparams,
            trial_seed=self._config.reproducibility.experiment_seed or 0,
            slots=ranks,
            model_dir=str(self._directory),
            run_dir=str(run_dir),
            checkpoint_dir=str(run_dir / "checkpoints"),
            **fields,
        )

    def fingerprint(self) -> Any:
        """Return the hyperparameters and the engine file."""
        return [self._config.to_dict().get("entrypoint"), self._hparams, self.content]


@dataclass
class ScriptSubject:
    """A script and its engine file, whose name in the script's arguments is replaced.

    Args:
        file: Engine file.
        words: The script and its arguments.
        local_rank: Whether each rank gets ``--local_rank=N``.
        mappings: Arguments of the script by the key of the engine file that they repeat, as in
            DeepSpeed's ``autotuning.arg_mappings``.
        ranks: Ranks; None for all slots.

    Raises:
        ConfigError: If the file cannot be read, or the script is missing.
    """

    file: Path
    words: Sequence[str]
    local_rank: bool = True
    mappings: Mapping[str, str] = field(default_factory=dict)
    ranks: int | None = None
    overrides_key: str = field(default="the engine file", init=False)
    forks: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.source = str(self.file)
        raw, _ = read_source(self.file)
        self.content: Mapping[str, Any] = raw
        if not self.words:
            problem = (
                "script: is missing; give it after --, as in `zerolab autotune ds_config.json "
            )
            raise ConfigError(
                self.source, [f"{problem}-- train.py --deepspeed_config ds_config.json`"]
            )
        if self.words[0].endswith(".py") and not Path(self.words[0]).is_file():
            problem = f"script: must be a file, got {self.words[0]}, which does not exist"
            raise ConfigError(self.source, [problem])
        self.override_engine = not any(self._names_file(word) for word in self.words)

    def run_spec(self, run_dir: Path, ranks: int, overrides: Mapping[str, Any]) -> RunSpec:
        """Return the run with overrides, in a copy of the engine file."""
        arguments = list(self.words)
        copy = run_dir / self.file.name
        write_json(copy, with_overrides(self.content, overrides))
        arguments = [self._replaced(word, copy) for word in arguments]
        for key, option in self.mappings.items():
            value = overrides.get(key)
            if value is not None:
                arguments = _with_option(arguments, option, str(value))
        first = [sys.executable, "-u"] if arguments[0].endswith(".py") else []
        position = len(first) + 1 if first and self.local_rank else None
        return RunSpec(
            experiment_id=0,
            trial_id=0,
            run_id=0,
            config={},
            hparams={},
            entrypoint=Command((*first, *arguments), local_rank_at=position, plain=True),
            trial_seed=0,
            slots=ranks,
            model_dir=str(Path.cwd()),
            run_dir=str(run_dir),
            checkpoint_dir=str(run_dir / "checkpoints"),
        )

    def fingerprint(self) -> Any:
        """Return the command and the engine file."""
        return [list(self.words), self.content, dict(self.mappings)]

    def _names_file(self, word: str) -> bool:
        name = word.partition("=")[2] if word.startswith("-") else word
        return name.endswith(self.file.name) and _is_same(Path(name), self.file)

    def _replaced(self, word: str, copy: Path) -> str:
        if not self._names_file(word):
            return word
        option, equals, _ = word.partition("=") if word.startswith("-") else ("", "", "")
        return f"{option}{equals}{copy}"


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def _with_option(arguments: Sequence[str], option: str, value: str) -> list[str]:
    """Set an option of a command line, in either of its forms.

    Example:
        >>> _with_option(["train.py", "--batch", "8"], "--batch", "4")
        ['train.py', '--batch', '4']
    """
    changed = list(arguments)
    for index, word in enumerate(changed):
        if word == option and index + 1 < len(changed):
            changed[index + 1] = value
            return changed
        if word.startswith(f"{option}="):
            changed[index] = f"{option}={value}"
            return changed
    return [*changed, option, value]
