"""Tables of all configuration keys for the docs, generated from the sections.

``python -m tools.key_tables docs`` writes them between the markers of ``reference/ds_config.md``,
``reference/experiment_config.md`` and ``migrate/from_determined.md``.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolab.config.engine.dialect import dialect
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.config.engine.optimizers import OPTIMIZERS, TORCH_OPTIMIZERS
from zerolab.config.engine.schedules import SCHEDULES, TORCH_SCHEDULES
from zerolab.config.experiment.experiment_config import ExperimentConfig
from zerolab.replacements import replacements
from zerolab.schema.lengths import Length
from zerolab.schema.section import HINT, Section, choices_of, section_of

if TYPE_CHECKING:
    from zerolab.extensions.config_checks.unsupported import UnsupportedKey

__all__ = ["PAGES", "TABLES", "field_texts", "rows", "table", "with_tables"]

PAGES = ("reference/ds_config.md", "reference/experiment_config.md", "migrate/from_determined.md")
"""Documents with tables, by their path in ``docs``."""

Row = tuple[str, str, str, str]
"""Key, type, default, meaning."""


@cache
def field_texts(kind: type, base: type = Section) -> Mapping[str, str]:
    """Return the text under each field of a class, by the field's name.

    Args:
        kind: A section, or another class that declares fields.
        base: Its base class, whose fields are left out.
    """
    texts: dict[str, str] = {}
    declared_in: tuple[type, ...] = getattr(kind, "declared_in", ())
    for cls in declared_in:
        texts |= field_texts(cls, base)
    for cls in reversed(kind.__mro__):
        if not issubclass(cls, base) or cls is base or declared_in:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        definition = tree.body[0]
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                texts[field.target.id] = " ".join(str(text.value.value).replace("``", "`").split())
    return texts


def rows(section: type[Section], model: str, prefix: str = "") -> Iterator[Row]:
    """Yield a row for each key of a section and of the sections inside it.

    Args:
        section: A section of the engine's or the experiment's file.
        model: Owner of the keys, ``DeepSpeed`` or ``Determined``.
        prefix: Dotted key of the section, with a final dot.
    """
    texts = field_texts(section)
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        text = texts[name]
        if choices := choices_of(field):
            yield from _choice_rows(inner, choices, model, f"{prefix}{name}.")
            continue
        if inner is not None and inner is not Length:
            many = "[]" if typing.get_origin(field.annotation) is list else ""
            yield from rows(inner, model, f"{prefix}{name}{many}.")
            continue
        extra = field.json_schema_extra
        if isinstance(extra, dict) and HINT in extra:
            text = f"In {model}: {text[0].lower()}{text[1:]} No effect here: {extra[HINT]}."
        default = (
            "required"
            if field.is_required()
            else _default(field.get_default(call_default_factory=True, validated_data={}))
        )
        yield f"{prefix}{field.alias or name}", _type(field.annotation), default, text


def _choice_rows(
    shared: type[Section] | None, choices: Mapping[str, type[Section]], model: str, prefix: str
) -> Iterator[Row]:
    """Yield rows of a block with several kinds: the name, shared keys, keys of one kind."""
    assert shared is not None
    meanings = (f"`{name}`: {field_texts(cls)['name']}" for name, cls in choices.items())
    names = ", ".join(f"`{name}`" for name in choices)
    yield f"{prefix}name", names, "required", " ".join(meanings)
    yield from (row for row in rows(shared, model, prefix) if row[0] != f"{prefix}name")
    owners: dict[Row, list[str]] = {}
    for name, section in choices.items():
        for row in rows(section, model, prefix):
            field = row[0].removeprefix(prefix).split(".")[0]
            if field != "name" and field not in shared.model_fields:
                owners.setdefault(row, []).append(f"`{name}`")
    for (key, kind, default, text), names_of_owners in owners.items():
        yield key, kind, default, f"{text} ({', '.join(names_of_owners)})"


def _default(value: Any) -> str:
    if isinstance(value, Length):
        return f"`{{{value.unit}: {value.count}}}`"
    if isinstance(value, bool) or value is None:
        return {True: "`true`", False: "`false`", None: "`null`"}[value]
    return f"`{value}`" if value != "" else '`""`'


def _type(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(parts[0])
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(part) for part in parts if part is not type(None))
    if origin is list:
        return f"list of {_type(parts[0])}"
    names = {int: "integer", float: "number", bool: "boolean", str: "text", Length: "length"}
    return names.get(annotation, "mapping" if origin is dict else "any")


def table(head: tuple[str, ...], body: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in body]
    return "\n".join(lines)


def _keys(section: type[Section], model: str, prefix: str = "") -> str:
    table_rows = (
        (f"`{key}`", kind, default, text)
        for key, kind, default, text in rows(section, model, prefix)
    )
    return table(("key", "type", "default", "effect"), table_rows)


def _arguments(sections: Mapping[str, type[Section]]) -> str:
    def body() -> Iterator[tuple[str, str]]:
        for name, section in sections.items():
            arguments = []
            for key, field in section.model_fields.items():
                value = (
                    "required"
                    if field.is_required()
                    else _default(field.get_default(call_default_factory=True, validated_data={}))
                )
                arguments.append(f"`{key}` ({value.strip('`')})")
            yield f"`{name}`", ", ".join(arguments)

    return table(("type", "params (default)"), body())


def _pairs(head: tuple[str, str], pairs: Mapping[str, str]) -> str:
    return table(head, ((f"`{key}`", text) for key, text in sorted(pairs.items())))


def _refused(head: str, keys: "Mapping[str, UnsupportedKey]") -> str:
    body = (
        (f"`{key}`", ", ".join(filter(None, ["`null`", entry.off.text])), entry.instead)
        for key, entry in sorted(keys.items())
    )
    return table((head, "off, and accepted", "instead"), body)


def _aliases() -> str:
    from zerolab.extensions.deepspeed_config.unsupported_keys import ALIASES

    pairs = {key: f"`{first}`" for key, first in ALIASES.items()}
    return _pairs(("alias", "key"), pairs)


def _names(names: frozenset[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) + "."


def _of_extension(module: str, name: str) -> Any:
    """Return an object of an extension, which may be missing while its tables are not needed."""
    return getattr(importlib.import_module(f"zerolab.extensions.{module}"), name)


TABLES = {
    "engine keys": lambda: _keys(EngineConfig, "DeepSpeed"),
    "engine optimizers": lambda: _arguments(OPTIMIZERS),
    "engine torch optimizers": lambda: _names(TORCH_OPTIMIZERS),
    "engine schedules": lambda: _arguments(SCHEDULES),
    "engine torch schedules": lambda: _names(TORCH_SCHEDULES),
    "engine refused": lambda: _refused("key", dialect().unsupported),
    "engine aliases": _aliases,
    "experiment fields": lambda: _keys(ExperimentConfig, "Determined"),
    "experiment stage": lambda: _keys(
        _of_extension("staging.section", "StageConfig"), "Determined", "data.stage."
    ),
    "experiment refused": lambda: _refused(
        "field", _of_extension("config_checks.unsupported_fields", "UNSUPPORTED_FIELDS")
    ),
    "experiment strangers": lambda: _pairs(
        ("value", "message"),
        {
            f"searcher.name: {name}": text
            for name, text in _of_extension(
                "config_checks.unsupported_fields", "OTHER_SEARCHERS"
            ).items()
        },
    ),
    "determined names": lambda: _pairs(
        ("in Python", "here"),
        {f"determined.{name}": text for name, text in replacements("determined.").items()},
    ),
    "determined commands": lambda: _pairs(
        ("Determined", "here"),
        {f"det {command}": text for command, text in replacements("det ").items()},
    ),
}
"""Name of a marker to the content between it and its end."""


def with_tables(text: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """Return a document with the content between its markers replaced."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{tables[match[2]]()}\n{match[3]}"

    return re.sub(r"(<!-- (\w[\w ]*) -->)\n.*?(<!-- end -->)", fill, text, flags=re.DOTALL)


def main(folder: Path) -> None:
    """Write the tables into the documents of a folder."""
    for page in map(folder.joinpath, PAGES):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
