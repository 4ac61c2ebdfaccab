"""Generate files from the code: the page's TypeScript types and the tables of the docs.

Run ``python -m tools.api_types`` in the root of the repository after you change a subclass of
:class:`~zeroserver.api.rows.Resource` or :mod:`zeroserver.states`; until then a test fails. The
tables of ``rest.md`` are those with a marker there: ``<!-- resource Trial -->``.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from tools.key_tables import field_texts, table, with_tables
from zeroserver.api.rows import REFERENCE, Resource
from zeroserver.app import ROUTERS
from zeroserver.states import (
    EXPERIMENT_ACTIONS,
    EXPERIMENT_MOVES,
    RUN_MOVES,
    TRIAL_ACTIONS,
    TRIAL_MOVES,
    Action,
)

__all__ = ["generated", "typescript"]

TYPES = Path("server/web/src/resources.ts")
DOCUMENT = Path("docs/reference/rest.md")
LIFE = Path("docs/concepts/life_cycle.md")

_HEAD = """\
/** The resources of the REST API. Made from the server's structs, not by hand:
 * python -m tools.api_types
 */
"""


@cache
def resources() -> tuple[type[Resource], ...]:
    """Return the resources that the server's core and extensions declare."""
    for name in ROUTERS:
        ROUTERS[name]  # imports its module
    return tuple(_subclasses(Resource))


def _subclasses(kind: type[Resource]) -> Iterator[type[Resource]]:
    for subclass in kind.__subclasses__():
        if subclass.__module__.startswith("zeroserver."):
            yield subclass
        yield from _subclasses(subclass)


def schemas() -> dict[str, Any]:
    """Return the JSON schema of every resource by name."""
    return msgspec.json.schema_components(resources(), ref_template=REFERENCE)[1]


def typescript() -> str:
    """The TypeScript types of all resources."""
    aliases: dict[str, str] = {}
    texts = {kind.__name__: field_texts(kind, Resource) for kind in resources()}
    blocks = [
        _declaration(name, schema, texts.get(name, {}), aliases)
        for name, schema in sorted(schemas().items())
    ]
    named = [f"export type {name} = {kind};\n" for name, kind in sorted(aliases.items())]
    return "\n".join([_HEAD, *named, *blocks])


def _declaration(
    name: str, schema: Mapping[str, Any], texts: Mapping[str, str], aliases: dict[str, str]
) -> str:
    comment = f"/** {schema['description']} */\n" if "description" in schema else ""
    if schema.get("type") != "object":
        return f"{comment}export type {name} = {_bare(schema, aliases)};\n"
    lines = []
    for key, item in schema["properties"].items():
        if key in texts:
            lines.append(f"  /** {texts[key]} */")
        lines.append(f"  {key}: {_type(item, aliases)};")
    return f"{comment}export interface {name} {{\n" + "\n".join(lines) + "\n}\n"


def _type(schema: Mapping[str, Any], aliases: dict[str, str]) -> str:
    """The type of a value; one with a title gets that name, and is declared once."""
    if "title" in schema:
        aliases[schema["title"]] = _bare(schema, aliases)
        return str(schema["title"])
    return _bare(schema, aliases)


def _bare(schema: Mapping[str, Any], aliases: dict[str, str]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if not schema:
        return "unknown"
    if "anyOf" in schema:
        return " | ".join(_type(item, aliases) for item in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(json.dumps, schema["enum"]))
    if "prefixItems" in schema:
        return "[" + ", ".join(_type(item, aliases) for item in schema["prefixItems"]) + "]"
    kind, values = str(schema["type"]), schema.get("additionalProperties")
    if kind == "array":
        kind = f"Array<{_type(schema['items'], aliases)}>"
    elif kind == "object":
        kind = f"Record<string, {_type(values, aliases) if values else 'unknown'}>"
    return "number" if kind == "integer" else kind


def _rows(kind: type[Resource], definitions: Mapping[str, Any]) -> str:
    """The table of a resource for the document; states are listed in it."""
    texts = field_texts(kind, Resource)
    rows = []
    for name, item in definitions[kind.__name__]["properties"].items():
        written = _type(item, {})
        named = definitions.get(written, {})
        rows.append(
            (f"`{name}`", f"`{_bare(named if 'enum' in named else item, {})}`", texts[name])
        )
    return table(("field", "type", "meaning"), rows)


def _moves() -> str:
    """States and their transitions."""
    rows = [
        (thing, f"`{state}`", ", ".join(f"`{item}`" for item in moves if item in following) or "-")
        for thing, moves in (
            ("experiment", EXPERIMENT_MOVES), ("trial", TRIAL_MOVES), ("run", RUN_MOVES),
        )
        for state, following in moves.items()
    ]  # fmt: skip
    return table(("of", "state", "may become"), rows)


def _actions() -> str:
    """Actions allowed in each state."""
    return "\n\n".join(
        table((f"{thing} is", *actions), [
            (f"`{state}`", *(_in_state(action, state) for action in actions.values()))
            for state in moves
        ])
        for thing, moves, actions in (
            ("experiment", EXPERIMENT_MOVES, EXPERIMENT_ACTIONS),
            ("trial", TRIAL_MOVES, TRIAL_ACTIONS),
        )
    )  # fmt: skip


def _in_state(action: Action, state: str) -> str:
    if state in action.does:
        return "does"
    return "-" if state in action.done else ""


def generated(root: Path) -> dict[Path, str]:
    """Generated files and their expected content."""
    names = schemas()

    def of(kind: type[Resource]) -> Callable[[], str]:
        return lambda: _rows(kind, names)

    tables = {f"resource {kind.__name__}": of(kind) for kind in resources()}
    page, life = root / DOCUMENT, root / LIFE
    rules = {"actions": _actions, "moves": _moves}
    return {
        root / TYPES: typescript(),
        page: with_tables(page.read_text(encoding="utf-8"), tables),
        life: with_tables(life.read_text(encoding="utf-8"), rules),
    }


if __name__ == "__main__":
    for path, text in generated(Path(sys.argv[1] if len(sys.argv) > 1 else ".")).items():
        path.write_text(text, encoding="utf-8")
