"""Generate files from the code: the page's TypeScript types and the tables of the docs.

``python -m tools.api_types`` in the repository's root, after a change of
:mod:`zeroserver.api.resources` or :mod:`zeroserver.states`; a test fails until it was done.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tools.key_tables import field_texts, table, with_tables
from zeroserver.api import resources
from zeroserver.api.rows import REFERENCE, Resource
from zeroserver.extensions import experiment_groups, submitted_files
from zeroserver.extensions.analysis import resources as analysis
from zeroserver.extensions.checkpoint_removal import resources as removal
from zeroserver.extensions.comments import resources as comments
from zeroserver.extensions.config_defaults import resources as config_defaults
from zeroserver.extensions.custom_search import router as custom_search
from zeroserver.extensions.media import resources as media
from zeroserver.extensions.model_registry import resources as models
from zeroserver.extensions.notifications import resources as notifications
from zeroserver.extensions.projects import resources as projects
from zeroserver.extensions.queue import resources as queue
from zeroserver.extensions.saved_views import resources as saved_views
from zeroserver.extensions.search_preview import router as search_preview
from zeroserver.extensions.search_view import resources as search_view
from zeroserver.extensions.share_links import resources as share_links
from zeroserver.extensions.users import resources as users
from zeroserver.states import (
    EXPERIMENT_ACTIONS,
    EXPERIMENT_MOVES,
    RUN_MOVES,
    TRIAL_ACTIONS,
    TRIAL_MOVES,
    Action,
)

__all__ = ["generated", "typescript"]

RESOURCES = tuple(
    value
    for module in (
        resources, models, queue, analysis, custom_search, search_preview, search_view, removal,
        submitted_files, users, media, notifications, projects, config_defaults,
        saved_views, share_links, comments, experiment_groups,
    )
    for value in map(vars(module).get, module.__all__)
    if isinstance(value, type) and issubclass(value, Resource)
)  # fmt: skip
TYPES = Path("server/web/src/resources.ts")
DOCUMENT = Path("docs/reference/rest.md")
LIFE = Path("docs/concepts/life_cycle.md")

TOLD = (
    resources.Experiment,
    resources.Trial,
    resources.Run,
    resources.Checkpoint,
    resources.BestCheckpoint,
    removal.Removal,
    removal.RemovedCheckpoint,
    models.Model,
    models.ModelVersion,
    projects.Project,
    config_defaults.Defaults,
    media.Media,
    media.MediaName,
    notifications.Channel,
    notifications.Notification,
    submitted_files.EngineAnswer,
    submitted_files.EngineEntry,
    resources.Log,
    resources.Curve,
    analysis.Importance,
    analysis.HparamShare,
    search_view.SearcherState,
    search_view.Bracket,
    search_view.Rung,
    search_view.RungEntry,
    search_preview.SearchPreview,
    custom_search.SearchEvents,
    custom_search.SearchEvent,
    resources.Agent,
    queue.Job,
    resources.Pool,
    queue.Quota,
    queue.QuotaRequest,
    users.User,
    users.ApiToken,
    share_links.Share,
    saved_views.View,
    comments.Comment,
    experiment_groups.ExperimentGroup,
    experiment_groups.BestOfGroup,
    users.AuditEntry,
)
"""Resources with a table of their own in the document."""

_HEAD = """\
/** The resources of the REST API. Made from the server's structs, not by hand:
 * python -m tools.api_types
 */
"""


def schemas() -> dict[str, Any]:
    """Return the JSON schema of every resource by name."""
    return msgspec.json.schema_components(RESOURCES, ref_template=REFERENCE)[1]


def typescript() -> str:
    """The TypeScript types of all resources."""
    aliases: dict[str, str] = {}
    texts = {kind.__name__: field_texts(kind, Resource) for kind in RESOURCES}
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

    tables = {f"resource {kind.__name__}": of(kind) for kind in TOLD}
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
