"""Base class of all configuration sections, keys without effect, and pydantic's errors as ours."""

import difflib
import re
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

from zerolab.registry import Registry

__all__ = [
    "HINT",
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
    "drop_nulls",
    "hint",
    "hints_of",
    "keys_of",
    "requirement",
    "suggest",
    "validate",
]

Path = tuple[str | int, ...]
"""Path of a value in a file: keys and list indices from the top."""


class Section(BaseModel):
    """Block of a configuration file: immutable, without unknown keys."""

    model_config = ConfigDict(
        defer_build=True,  # built on first use: programs that never read it pay nothing
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=False,
    )


class OneOf:
    """Marker of a field that is one of several sections, chosen by its ``name``.

    Args:
        choices: Values of ``name``, and the section of each.
    """

    def __init__(self, choices: Mapping[str, type[Section]]) -> None:
        self._choices = choices

    def loadable(self) -> Mapping[str, type[Section]]:
        """Return the sections, but those of extensions that cannot be imported."""
        return self._choices.loadable() if isinstance(self._choices, Registry) else self._choices

    def problem(self, name: str) -> str | None:
        """Return why the extension that provides a section cannot be used, if one does."""
        return self._choices.problem(name) if isinstance(self._choices, Registry) else None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Build a union schema that is tagged by the name."""
        del source
        schemas = {name: handler.generate_schema(cls) for name, cls in self.loadable().items()}
        return core_schema.tagged_union_schema(schemas, discriminator="name")


def choices_of(field: FieldInfo) -> Mapping[str, type[Section]]:
    """Return the sections of a field that is :class:`OneOf` several, else an empty mapping."""
    return next((mark.loadable() for mark in field.metadata if isinstance(mark, OneOf)), {})


def _integer_from_float(value: object) -> object:
    """Convert an integral float such as 5e8 to an integer."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


_LARGEST = 2**63 - 1
"""Maximum integer of a database: a larger number would fail there, without naming its key."""
_LARGEST_COUNT = 2**31 - 1
"""Maximum of counts: slots, machines, concurrent trials, seconds of waiting."""
Int = Annotated[int, BeforeValidator(_integer_from_float), Field(ge=-_LARGEST, le=_LARGEST)]
PositiveInt = Annotated[int, BeforeValidator(_integer_from_float), Field(gt=0, le=_LARGEST)]
NonNegativeInt = Annotated[int, BeforeValidator(_integer_from_float), Field(ge=0, le=_LARGEST)]
Count = Annotated[int, BeforeValidator(_integer_from_float), Field(gt=0, le=_LARGEST_COUNT)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
S = TypeVar("S", bound=Section)


def closest(key: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that ``key`` was most likely meant to be, if any is close."""
    folded = {name.lower(): name for name in names}
    close = difflib.get_close_matches(key.lower(), folded, n=1, cutoff=cutoff)
    return folded[close[0]] if close else None


def suggest(key: str, names: Iterable[str]) -> str:
    """Return ``; did you mean 'stage'?`` when a known name is close to ``key``, else ``""``."""
    close = closest(key, names)
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
    """Return the section class inside ``Section``, ``Section | None`` or ``list[Section]``."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list):
        sections = (section_of(part) for part in typing.get_args(annotation))
        return next((section for section in sections if section is not None), None)
    return None


def keys_of(section: type[Section]) -> list[str]:
    """Return the keys of a section as written in a file."""
    return [field.alias or name for name, field in section.model_fields.items()]


def _section_at(section: type[Section], path: Path) -> type[Section] | None:
    """Return the section at pydantic's path, which includes the names of chosen sections."""
    current: type[Section] | None = section
    choices: Mapping[str, type[Section]] = {}
    for part in path:
        if isinstance(part, int):
            continue
        if part in choices:
            current, choices = choices[part], {}
            continue
        if current is None or part not in current.model_fields:
            return None
        choices = choices_of(current.model_fields[part])
        current = section_of(current.model_fields[part].annotation)
    return current


def _file_path(section: type[Section], path: Path) -> Path:
    """Return the path as in the file: without the names of chosen sections."""
    parts: list[str | int] = []
    choices: Mapping[str, type[Section]] = {}
    for index, part in enumerate(path):
        if part in choices:
            choices = {}
            continue
        parent = _section_at(section, path[:index])
        if parent is not None and part in parent.model_fields:
            choices = choices_of(parent.model_fields[str(part)])
        parts.append(part)
    return tuple(parts)


def _intended_paths(section: type[Section], path: Path) -> list[Path]:
    """Return the path of the key that an unknown key was meant as; its value is doubtful, too."""
    block = _block_with_key(section, path)
    if block is not None:
        return [(*block, path[-1])]
    parent = _section_at(section, path[:-1])
    close = closest(str(path[-1]), keys_of(parent)) if parent else None
    return [(*_file_path(section, path[:-1]), close)] if close else []


def _other_choice_problem(section: type[Section], path: Path, value: object) -> str | None:
    """Return the message for a key that belongs to another choice than the file's."""
    if len(path) < 3:
        return None
    parent = _section_at(section, path[:-3])
    field = parent.model_fields.get(str(path[-3])) if parent else None
    owners = (
        [name for name, cls in choices_of(field).items() if path[-1] in keys_of(cls)]
        if field
        else []
    )
    if not owners:
        return None
    block = dotted(_file_path(section, path[:-1]))
    return (
        f"{block}.{path[-1]}: does not belong to the {path[-2]} {path[-3]}, got {_show(value)}; "
        f"remove it or set {block}.name to {' or '.join(owners)}"
    )


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _block_with_key(section: type[Section], path: Path) -> Path | None:
    """Return the block that has an unknown key, if exactly one block of the file does."""
    name = str(path[-1])
    blocks: dict[Path, type[Section]] = {(): section}
    for key, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            blocks[field.alias or key,] = inner
    matches = [block_path for block_path, block in blocks.items() if name in keys_of(block)]
    return matches[0] if len(matches) == 1 else None


def _unknown_hint(section: type[Section], path: Path) -> str:
    """Return a hint for an unknown key: a known key, its block, or the nested form."""
    parent, name = _section_at(section, path[:-1]), str(path[-1])
    if parent is None:
        return ""
    block = _block_with_key(section, path)
    if block is not None:
        return f"; it belongs {f'in {dotted(block)}' if block else 'at the top of the file'}"
    first, _, nested = name.partition(".")
    if nested and first in keys_of(parent):
        inside = ": {".join(name.split("."))
        return f"; a dot does not nest; write {inside}: ...{'}' * name.count('.')}"
    suggestion = suggest(name, keys_of(parent))
    return (
        suggestion
        if suggestion or "params" not in parent.model_fields
        else "; arguments go in 'params'"
    )


def _unknown_choice(section: type[Section], key: str, error: Mapping[str, Any]) -> str:
    tag = error["ctx"]["tag"]
    path: Path = error["loc"]
    parent = _section_at(section, path[:-1])
    field = parent.model_fields.get(str(path[-1])) if parent else None
    marks = [mark for mark in field.metadata if isinstance(mark, OneOf)] if field else []
    problem = marks[0].problem(tag) if marks else None
    if problem is not None:
        return f"{key}.name: {problem}"
    names = error["ctx"]["expected_tags"].replace("'", "").split(", ")
    return f"{key}.name: must be one of {', '.join(names)}, got {tag!r}{suggest(tag, names)}"


def _intended_choice(section: type[Section], error: Mapping[str, Any]) -> str | list[str]:
    """Return the choice that an unknown name was meant as; else problems of unknown keys."""
    path: Path = error["loc"]
    parent = _section_at(section, path[:-1])
    field = parent.model_fields.get(str(path[-1])) if parent else None
    choices = choices_of(field) if field else {}
    close = closest(str(error["ctx"]["tag"]), choices)
    if close is not None or not isinstance(error["input"], Mapping):
        return close or []
    known = sorted({key for choice in choices.values() for key in keys_of(choice)})
    block = dotted(_file_path(section, path))
    return [
        f"{block}.{key}: unknown key{suggest(str(key), known)}"
        for key in error["input"]
        if key not in known and key != "name"
    ]


def _unknown_key(section: type[Section], key: str, error: Mapping[str, Any]) -> str:
    path: Path = error["loc"]
    stranger = _other_choice_problem(section, path, error["input"])
    if stranger is not None:
        return stranger
    return f"{key}: unknown key{_unknown_hint(section, path)}"


_MISSING_SUFFIXES = {"missing": "", "union_tag_not_found": ".name"}
"""Kind of error to the suffix of the key in the message."""
_NO_MAPPING = ("model_type", "model_attributes_type")


def _problem(section: type[Section], error: Mapping[str, Any]) -> str:
    kind = error["type"]
    key = dotted(_file_path(section, error["loc"]))
    if kind == "union_tag_invalid":
        return _unknown_choice(section, key, error)
    if kind == "extra_forbidden":
        return _unknown_key(section, key, error)
    if kind in _MISSING_SUFFIXES:
        return f"{key}{_MISSING_SUFFIXES[kind]}: is required, got nothing"
    if kind == "value_error":
        return f"{key}: {error['ctx']['error']}"
    if kind in _NO_MAPPING:
        return f"{key}: must be a mapping of keys to values, got {_show(error['input'])}"
    return f"{key}: {requirement(error)}"


_SHOULD = re.compile(r"^(?!Keys)[A-Z]\w+ should (?=be|have|match)")
_WRONG_LENGTH = re.compile(r" after validation, not (\d+)$")
_PLAIN_WORDS = {
    "Keys should be": "keys must be",
    ", unable to parse string as an integer": "",
    ", unable to parse string as a number": "",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid integer": "a whole number",
    "a valid boolean": "true or false",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid list": "a list",
}


def requirement(error: Mapping[str, Any]) -> str:
    """Describe a problem of pydantic as ``must be A, got B``.

    Args:
        error: An item of ``errors()`` of its exception.
    """
    message = _SHOULD.sub("must ", error["msg"])
    if length := _WRONG_LENGTH.search(message):
        return f"{message[: length.start()]}, got {length[1]}"
    for pattern, replacement in _PLAIN_WORDS.items():
        message = message.replace(pattern, replacement)
    value, hint = error["input"], ""
    if error["type"] == "literal_error" and isinstance(value, str):
        hint = suggest(value, re.findall(r"'([^']*)'", error["ctx"]["expected"]))
    return f"{message[0].lower()}{message[1:]}, got {_show(value)}{hint}"


def remove_path(data: Any, path: Path) -> Any:
    """Copy ``data`` without the value at ``path``."""
    if not path:
        return {}
    head, tail = path[0], path[1:]
    if isinstance(data, Mapping) and head in data:
        if tail and isinstance(data[head], Mapping | list):
            return {**data, head: remove_path(data[head], tail)}
        return {key: value for key, value in data.items() if key != head}
    if isinstance(data, list) and isinstance(head, int) and head < len(data):
        if tail and isinstance(data[head], Mapping | list):
            return [*data[:head], remove_path(data[head], tail), *data[head + 1 :]]
        return [*data[:head], *data[head + 1 :]]
    return data


def _replace(data: Any, path: Path, value: object) -> Any:
    """Copy ``data`` with another value at ``path``."""
    if not path:
        return value
    head, tail = path[0], path[1:]
    if isinstance(data, list) and isinstance(head, int):
        return [*data[:head], _replace(data[head], tail, value), *data[head + 1 :]]
    return {**data, head: _replace(data[head], tail, value)}


def drop_nulls(
    content: Mapping[str, Any], opaque: Collection[str], prefix: str = ""
) -> dict[str, Any]:
    """Remove keys whose value is null, which means their default.

    Args:
        content: Content of a file.
        opaque: Dotted keys whose content belongs to the user and is unchanged.
        prefix: Dotted key of ``content`` itself, followed by a dot.
    """
    result: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in opaque:
            result[name] = drop_nulls(value, opaque, f"{key}.")
        elif value is not None:
            result[name] = value
    return result


def validate(section: type[S], data: Mapping[str, Any]) -> tuple[S | None, list[str], list[Path]]:
    """Validate a mapping; continue after mistakes so that later checks can find more.

    Args:
        section: Section to build.
        data: Keys and values as in the file.

    Returns:
        The section (invalid fields have their defaults; None when nothing could be built), one line
        for every problem, and the invalid paths.
    """
    problems: list[str] = []
    bad_paths: list[Path] = []
    remaining: Any = data
    for _ in range(20):
        try:
            return section.model_validate(remaining), problems, bad_paths
        except ValidationError as error:
            # Backwards, so that list indices stay valid while items are removed.
            earlier, bad_paths = bad_paths, [*bad_paths]
            for problem in reversed(error.errors(include_url=False)):
                path = _file_path(section, tuple(problem["loc"]))
                # A removed value may be missed further up; that is not the user's mistake.
                if not any(seen[: len(path)] == path for seen in earlier):
                    problems.append(_problem(section, problem))
                bad_paths.append(path)
                if problem["type"] == "extra_forbidden":
                    bad_paths.extend(_intended_paths(section, tuple(problem["loc"])))
                if problem["type"] == "missing":
                    path = path[:-1]
                    bad_paths.append(path)
                if problem["type"] == "union_tag_invalid":
                    meant = _intended_choice(section, problem)
                    if isinstance(meant, str):  # check the other keys of the block as for that one
                        remaining = _replace(remaining, (*path, "name"), meant)
                        continue
                    problems.extend(meant)
                if path:
                    remaining = remove_path(remaining, path)
            problems.sort()
            if () in bad_paths:
                break
    return None, problems, bad_paths


HINT = "hint"


def hint(default: Any, reason: str, **constraints: Any) -> Any:
    """Declare a field that has no effect.

    Args:
        default: Default of the field.
        reason: Why it has no effect; shown when a file sets the key.
        constraints: Constraints of its value, as for :func:`pydantic.Field`.
    """
    return Field(default=default, json_schema_extra={HINT: reason}, **constraints)


def hints_of(section: type[Section], prefix: str = "") -> dict[str, str]:
    """List the hints of a section and its nested sections.

    Returns:
        Dotted key to reason.
    """
    hints: dict[str, str] = {}
    for name, field in section.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and HINT in extra:
            hints[prefix + name] = str(extra[HINT])
        elif (inner := section_of(field.annotation)) is not None:
            hints |= hints_of(inner, f"{prefix}{name}.")
    return hints
