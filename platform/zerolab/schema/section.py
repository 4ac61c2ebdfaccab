"""The base of every typed section, and the one place where pydantic's errors become ours."""

import difflib
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

__all__ = [
    "Count",
    "Fraction",
    "Int",
    "NonNegativeFloat",
    "NonNegativeInt",
    "OneOf",
    "Path",
    "PositiveFloat",
    "PositiveInt",
    "Section",
    "choices_of",
    "dotted",
    "keys_of",
    "suggest",
    "validate",
    "without_nulls",
]

Path = tuple[str | int, ...]
"""Where a value stands in a file: keys and list indices from the top."""


class Section(BaseModel):
    """A block of a configuration file: immutable, and without room for unknown keys."""

    model_config = ConfigDict(
        defer_build=True,  # a program that reads no file of a kind does not pay for its checks
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=False,
    )


class OneOf:
    """Marks a field that is one of several sections: which one, its own ``name`` says.

    Args:
        choices: What ``name`` may be, and the section that it chooses.
    """

    def __init__(self, choices: Mapping[str, type[Section]]) -> None:
        self.choices = choices

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Have pydantic choose by the name."""
        del source
        schemas = {name: handler.generate_schema(cls) for name, cls in self.choices.items()}
        return core_schema.tagged_union_schema(schemas, discriminator="name")


def choices_of(field: FieldInfo) -> Mapping[str, type[Section]]:
    """The sections of a field that is :class:`OneOf` several; none for any other field."""
    return next((mark.choices for mark in field.metadata if isinstance(mark, OneOf)), {})


def _whole(value: object) -> object:
    """Read 5e8 as the integer that it is."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


_LARGEST = 2**63 - 1
"""What a database holds: a larger number would fail there, far from its key."""
_LARGEST_COUNT = 2**31 - 1
"""The same for what is counted: slots, machines, trials at a time, seconds of waiting."""

Int = Annotated[int, BeforeValidator(_whole), Field(ge=-_LARGEST, le=_LARGEST)]
PositiveInt = Annotated[int, BeforeValidator(_whole), Field(gt=0, le=_LARGEST)]
NonNegativeInt = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=_LARGEST)]
Count = Annotated[int, BeforeValidator(_whole), Field(gt=0, le=_LARGEST_COUNT)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

S = TypeVar("S", bound=Section)


def closest(key: str, known: Iterable[str]) -> str | None:
    """The known key that ``key`` was most likely meant to be, if any is close."""
    folded = {name.lower(): name for name in known}
    close = difflib.get_close_matches(key.lower(), folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def suggest(key: str, known: Iterable[str]) -> str:
    """Say ``; did you mean 'stage'?`` when a known key is close to ``key``, else nothing."""
    close = closest(key, known)
    return f"; did you mean {close!r}?" if close else ""


def dotted(path: Sequence[str | int]) -> str:
    """Write a path as ``a.b[0].c``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def section_of(annotation: Any) -> type[Section] | None:
    """The section class inside ``Section``, ``Section | None`` or ``list[Section]``."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list):
        found = (section_of(part) for part in typing.get_args(annotation))
        return next((section for section in found if section is not None), None)
    return None


def keys_of(section: type[Section]) -> list[str]:
    """The keys that a section knows, as they are written in a file."""
    return [field.alias or name for name, field in section.model_fields.items()]


def _section_at(section: type[Section], path: Path) -> type[Section] | None:
    """The section at a path as pydantic gives it, with the names of chosen sections in it."""
    found: type[Section] | None = section
    choices: Mapping[str, type[Section]] = {}
    for part in path:
        if isinstance(part, int):
            continue
        if part in choices:
            found, choices = choices[part], {}
            continue
        if found is None or part not in found.model_fields:
            return None
        choices = choices_of(found.model_fields[part])
        found = section_of(found.model_fields[part].annotation)
    return found


def _as_written(section: type[Section], path: Path) -> Path:
    """The path as the file has it: without the names of chosen sections."""
    kept: list[str | int] = []
    choices: Mapping[str, type[Section]] = {}
    for index, part in enumerate(path):
        if part in choices:
            choices = {}
            continue
        home = _section_at(section, path[:index])
        if home is not None and part in home.model_fields:
            choices = choices_of(home.model_fields[str(part)])
        kept.append(part)
    return tuple(kept)


def _meant(section: type[Section], path: Path) -> list[Path]:
    """The known key that an unknown one stands for: its value is in doubt as well."""
    belongs = _misplaced(section, path)
    if belongs is not None:
        return [(*belongs, path[-1])]
    home = _section_at(section, path[:-1])
    close = closest(str(path[-1]), keys_of(home)) if home else None
    return [(*_as_written(section, path[:-1]), close)] if close else []


def _stranger(section: type[Section], path: Path, value: object) -> str | None:
    """Say that a key belongs to another choice than the one that the file makes."""
    if len(path) < 3:
        return None
    home = _section_at(section, path[:-3])
    field = home.model_fields.get(str(path[-3])) if home else None
    owners = (
        [name for name, cls in choices_of(field).items() if path[-1] in keys_of(cls)]
        if field
        else []
    )
    if not owners:
        return None
    block = dotted(_as_written(section, path[:-1]))
    return (
        f"{block}.{path[-1]}: does not belong to the {path[-2]} {path[-3]}, got {_show(value)}; "
        f"remove it or set {block}.name to {' or '.join(owners)}"
    )


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _misplaced(section: type[Section], path: Path) -> Path | None:
    """The block that knows an unknown key, if the top of the file and its blocks have one such."""
    name = str(path[-1])
    blocks: dict[Path, type[Section]] = {(): section}
    for key, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            blocks[field.alias or key,] = inner
    homes = [where for where, block in blocks.items() if name in keys_of(block)]
    return homes[0] if len(homes) == 1 else None


def _unknown_hint(section: type[Section], path: Path) -> str:
    """What an unknown key was meant to be: a known one, or a path that must be nested."""
    home, name = _section_at(section, path[:-1]), str(path[-1])
    if home is None:
        return ""
    belongs = _misplaced(section, path)
    if belongs is not None:
        return f"; it belongs {f'in {dotted(belongs)}' if belongs else 'at the top of the file'}"
    first, _, rest = name.partition(".")
    if rest and first in keys_of(home):
        inside = ": {".join(name.split("."))
        return f"; a dot does not nest; write {inside}: ...{'}' * name.count('.')}"
    told = suggest(name, keys_of(home))
    return told if told or "params" not in home.model_fields else "; arguments go in 'params'"


def _unknown_choice(key: str, error: Mapping[str, Any]) -> str:
    found = error["ctx"]["tag"]
    names = error["ctx"]["expected_tags"].replace("'", "").split(", ")
    return f"{key}.name: must be one of {', '.join(names)}, got {found!r}{suggest(found, names)}"


def _unknown_key(section: type[Section], key: str, error: Mapping[str, Any]) -> str:
    path: Path = error["loc"]
    stranger = _stranger(section, path, error["input"])
    if stranger is not None:
        return stranger
    return f"{key}: unknown key{_unknown_hint(section, path)}"


_ABSENT = {"missing": "", "union_tag_not_found": ".name"}
"""Kind of error to what stands behind the key in the message."""

_NO_MAPPING = ("model_type", "model_attributes_type")


def _problem(section: type[Section], error: Mapping[str, Any]) -> str:
    kind, message = error["type"], error["msg"]
    key = dotted(_as_written(section, error["loc"]))
    if kind == "union_tag_invalid":
        return _unknown_choice(key, error)
    if kind == "extra_forbidden":
        return _unknown_key(section, key, error)
    if kind in _ABSENT:
        return f"{key}{_ABSENT[kind]}: is required, got nothing"
    if kind == "value_error":
        return f"{key}: {error['ctx']['error']}"
    shown = _show(error["input"])
    if kind in _NO_MAPPING:
        return f"{key}: must be a mapping of keys to values, got {shown}"
    return f"{key}: {message[0].lower()}{message[1:]}, got {shown}"


def without(data: Any, path: Path) -> Any:
    """Copy ``data`` with what stands at ``path`` left out."""
    if not path:
        return {}
    head, rest = path[0], path[1:]
    if isinstance(data, Mapping) and head in data:
        if rest and isinstance(data[head], Mapping | list):
            return {**data, head: without(data[head], rest)}
        return {key: value for key, value in data.items() if key != head}
    if isinstance(data, list) and isinstance(head, int) and head < len(data):
        if rest and isinstance(data[head], Mapping | list):
            return [*data[:head], without(data[head], rest), *data[head + 1 :]]
        return [*data[:head], *data[head + 1 :]]
    return data


def without_nulls(
    content: Mapping[str, Any], opaque: Collection[str], prefix: str = ""
) -> dict[str, Any]:
    """Leave out keys that say null, which means their default.

    Args:
        content: A file.
        opaque: Dotted keys whose content is the user's own, and stays as it is.
        prefix: Dotted key of ``content`` itself, with a dot behind it.
    """
    kept: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in opaque:
            kept[name] = without_nulls(value, opaque, f"{key}.")
        elif value is not None:
            kept[name] = value
    return kept


def validate(section: type[S], data: Mapping[str, Any]) -> tuple[S | None, list[str], list[Path]]:
    """Read a mapping, and go on after its mistakes so that later checks can find more.

    Args:
        section: What the mapping should be.
        data: Keys and values as a file has them.

    Returns:
        The section (what was wrong is left at its default; None when nothing could be saved),
        one line for every problem, and the paths that were wrong.
    """
    problems: list[str] = []
    bad: list[Path] = []
    rest: Any = data
    for _ in range(20):
        try:
            return section.model_validate(rest), problems, bad
        except ValidationError as error:
            # From the back, so that the indices of a list stay true while items leave it.
            told, bad = bad, [*bad]
            for found in reversed(error.errors(include_url=False)):
                path = _as_written(section, tuple(found["loc"]))
                # What was left out may be missed further up; that is not the user's mistake.
                if not any(seen[: len(path)] == path for seen in told):
                    problems.append(_problem(section, found))
                bad.append(path)
                if found["type"] == "extra_forbidden":
                    bad.extend(_meant(section, tuple(found["loc"])))
                if found["type"] == "missing":
                    path = path[:-1]
                    bad.append(path)
                if path:
                    rest = without(rest, path)
            problems.sort()
            if () in bad:
                break
    return None, problems, bad
