"""The base of every typed section, and the one place where pydantic's errors become ours."""

import difflib
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

__all__ = [
    "Fraction",
    "Int",
    "NonNegativeFloat",
    "NonNegativeInt",
    "Path",
    "PositiveFloat",
    "PositiveInt",
    "Section",
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
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=False,
    )


def _whole(value: object) -> object:
    """Read 5e8 as the integer that it is."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Int = Annotated[int, BeforeValidator(_whole)]
PositiveInt = Annotated[int, BeforeValidator(_whole), Field(gt=0)]
NonNegativeInt = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
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
    found: type[Section] | None = section
    for part in path:
        if isinstance(part, int):
            continue
        if found is None or part not in found.model_fields:
            return None
        found = section_of(found.model_fields[part].annotation)
    return found


def _meant(section: type[Section], path: Path) -> list[Path]:
    """The known key that an unknown one stands for: its value is in doubt as well."""
    home = _section_at(section, path[:-1])
    close = closest(str(path[-1]), keys_of(home)) if home else None
    return [(*path[:-1], close)] if close else []


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _problem(section: type[Section], error: Mapping[str, Any]) -> str:
    path: Path = error["loc"]
    key = dotted(path)
    if error["type"] == "extra_forbidden":
        home = _section_at(section, path[:-1])
        hint = suggest(str(path[-1]), keys_of(home)) if home else ""
        return f"{key}: unknown key{hint}"
    if error["type"] == "missing":
        return f"{key}: is required, got nothing"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}"
    if error["type"] in ("model_type", "model_attributes_type"):
        return f"{key}: must be a mapping of keys to values, got {_show(error['input'])}"
    message = error["msg"]
    return f"{key}: {message[0].lower()}{message[1:]}, got {_show(error['input'])}"


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
                path = tuple(found["loc"])
                # What was left out may be missed further up; that is not the user's mistake.
                if not any(seen[: len(path)] == path for seen in told):
                    problems.append(_problem(section, found))
                bad.append(path)
                if found["type"] == "extra_forbidden":
                    bad.extend(_meant(section, path))
                if found["type"] == "missing":
                    path = path[:-1]
                    bad.append(path)
                if path:
                    rest = without(rest, path)
            problems.sort()
            if () in bad:
                break
    return None, problems, bad
