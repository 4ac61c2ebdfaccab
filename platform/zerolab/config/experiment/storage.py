"""The block ``checkpoint_storage``: location, credentials and retention of checkpoints."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, create_model
from pydantic.fields import FieldInfo

from zerolab.contract.secret_text import MASK, is_secret_name
from zerolab.contract.storage import StorageAddress
from zerolab.errors import ConfigError
from zerolab.schema.section import NonNegativeInt, Section, drop_nulls, validate
from zerolab.storage.registry import STORAGE_BACKENDS
from zerolab.storage.section import StorageConfig

__all__ = ["CheckpointStorageConfig", "address_of", "read_address", "storage_problems"]


class _Storage(Section):
    """The keys of the block that do not depend on its type."""

    type: str | None = None
    """``shared_fs`` or ``directory``: a directory that every machine sees at the same path;
    ``s3``, ``gcs`` or ``azure``: a bucket; by default the installation's directory."""

    save_experiment_best: NonNegativeInt = 0
    """Checkpoints kept of the experiment: those with the best metric."""

    save_trial_best: NonNegativeInt = 1
    """Checkpoints kept of each trial: those with the best metric."""

    save_trial_latest: NonNegativeInt = 1
    """Checkpoints kept of each trial: the newest."""


_BACKENDS = STORAGE_BACKENDS.loadable()


def _registered(kind: Any) -> Any:
    """Name the extension of a type that cannot be used."""
    if isinstance(kind, str) and (problem := STORAGE_BACKENDS.problem(kind)):
        raise ValueError(problem)
    return kind


def _block() -> Any:
    """Return the section with the keys of all types, each optional."""
    kind: Any = Literal[tuple(_BACKENDS)]
    fields: dict[str, Any] = {"type": (Annotated[kind | None, BeforeValidator(_registered)], None)}
    for backend in _BACKENDS.values():
        for key, field in backend.model_fields.items():
            fields.setdefault(key, (_annotation(field) | None, None))
    for key, field in _Storage.model_fields.items():
        fields.setdefault(key, (_annotation(field), field.default))
    block: Any = create_model("CheckpointStorageConfig", __base__=Section, **fields)
    block.__doc__ = "Storage and retention of checkpoints."
    block.declared_in = (_Storage, *_BACKENDS.values())
    return block


def _annotation(field: FieldInfo) -> Any:
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


if TYPE_CHECKING:
    CheckpointStorageConfig = _Storage
else:
    CheckpointStorageConfig = _block()


def storage_problems(storage: CheckpointStorageConfig) -> Iterator[str]:
    """Yield conflicts between keys of the block."""
    kind = storage.type or ""
    backend = _BACKENDS.get(kind)
    own_keys = backend.model_fields if backend else {}
    missing = [
        key
        for key, field in own_keys.items()
        if field.is_required() and getattr(storage, key) in (None, "")
    ]
    for key in missing:
        what = "a directory" if key.endswith("_path") else f"the {key}"
        yield f"checkpoint_storage.{key}: is required for type {kind!r}, got nothing; name {what}"
    all_keys = (key for section in _BACKENDS.values() for key in section.model_fields)
    for key in dict.fromkeys(all_keys):
        value = getattr(storage, key)
        if value is not None and key not in own_keys:
            yield _misplaced(storage, key)
        if value == MASK and is_secret_name(key):
            yield (
                f"checkpoint_storage.{key}: must be the key itself, got the mask that responses "
                "show instead; write it, or leave it out if machines have credentials"
            )
    if backend and not missing:
        yield from _keys_of_type(storage, backend).problems()


def _misplaced(storage: CheckpointStorageConfig, key: str) -> str:
    kinds = " or ".join(kind for kind, backend in _BACKENDS.items() if key in backend.model_fields)
    if storage.type is None:
        return f"checkpoint_storage.type: is required with {key}, got nothing; set it to {kinds}"
    return (
        f"checkpoint_storage.{key}: does not belong to the type {storage.type}; remove it or set "
        f"checkpoint_storage.type to {kinds}"
    )


def _keys_of_type(storage: CheckpointStorageConfig, backend: type[StorageConfig]) -> StorageConfig:
    values = {key: getattr(storage, key) for key in backend.model_fields}
    return backend.model_construct(
        **{key: value for key, value in values.items() if value is not None}
    )


def address_of(storage: CheckpointStorageConfig) -> StorageAddress | None:
    """Return the address of the storage; None for the installation's directory."""
    if storage.type is None:
        return None
    return _keys_of_type(storage, _BACKENDS[storage.type]).address()


def read_address(block: Mapping[str, Any]) -> StorageAddress | None:
    """Read a block ``checkpoint_storage`` outside of an experiment file.

    Raises:
        ConfigError: With all its problems.
    """
    values = drop_nulls(block, frozenset())
    storage, problems, _ = validate(CheckpointStorageConfig, values)
    problems = [f"checkpoint_storage.{problem}" for problem in problems]
    wrong_keys = {problem.partition(": ")[0] for problem in problems}
    if storage is not None:
        problems += [
            problem
            for problem in storage_problems(storage)
            if problem.partition(": ")[0] not in wrong_keys
        ]
    if problems or storage is None:
        raise ConfigError("checkpoint storage", problems)
    return address_of(storage)
