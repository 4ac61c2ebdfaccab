"""Reading JSON and YAML so that nothing written in a file is lost: duplicate keys are refused."""

import json
import re
from collections.abc import Hashable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolab.errors import ConfigError

if TYPE_CHECKING:
    import yaml

__all__ = ["experiment_file", "parse_json", "parse_yaml", "read_json", "read_yaml"]


def experiment_file(path: Path) -> Path:
    """Return the experiment file that a user means: a folder's ``experiment.yaml``, else the file.

    Raises:
        ConfigError: If the folder has none.
    """
    if not path.is_dir():
        return path
    found = [path / name for name in ("experiment.yaml", "experiment.yml")]
    for file in found:
        if file.is_file():
            return file
    others = sorted(each.name for each in path.iterdir() if each.suffix in (".yaml", ".yml"))
    has = f"its YAML files are: {', '.join(others)}" if others else "it has no YAML file"
    raise ConfigError(str(path), [f"folder: must have an experiment.yaml, got none; {has}"])


def _decode(text: bytes | str, source: str) -> str:
    """Read bytes as text: UTF-8, with or without a mark, or what the mark says.

    Raises:
        ConfigError: If it is something else, with the place of the first wrong byte.
    """
    if isinstance(text, str):
        return text
    try:
        return text.decode(json.detect_encoding(text))
    except UnicodeDecodeError as error:
        before = text[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        byte = text[error.start]
        problem = (
            f"line {line}, column {column}: must be text in UTF-8, got the byte 0x{byte:02x} "
            f"({chr(byte)!r} in Latin-1); save the file as UTF-8"
        )
        raise ConfigError(source, [problem]) from None


def _read(path: str | PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        problem = f"file: must be readable, got {error.strerror or error}"
        raise ConfigError(str(path), [problem]) from None


def read_json(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Raises:
        ConfigError: If it is missing, is not JSON, or names a key twice.
    """
    return parse_json(_read(path), str(path))


def read_yaml(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a YAML file that holds one mapping.

    Raises:
        ConfigError: If it is missing, is not YAML, or names a key twice.
    """
    return parse_yaml(_read(path), str(path))


def parse_json(text: bytes | str, source: str) -> dict[str, Any]:
    """Read JSON text that holds one object.

    Args:
        text: The content of a file.
        source: Its name, for messages.

    Raises:
        ConfigError: If it is not JSON, or names a key twice.
    """
    twice: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice.extend(sorted({key for key in keys if keys.count(key) > 1}))
        return dict(pairs)

    def refuse_constant(name: str) -> float:
        raise ValueError(f"numbers must be finite, got {name}")

    text = _decode(text, source)
    try:
        content = json.loads(text, object_pairs_hook=collect, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(source, [f"{where}: {_json_problem(text, error)}"]) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(source, [f"file: must be JSON, got an error: {error}"]) from None
    if twice:
        problems = [f"{key}: must be given once, got it more than once" for key in twice]
        raise ConfigError(source, problems)
    return _mapping(content, source)


def _json_problem(text: str, error: json.JSONDecodeError) -> str:
    """Say what is wrong by what stands at the place."""
    here, before = text[error.pos :], text[: error.pos].rstrip()
    if not here.strip():
        return "must be JSON, got the end of the file before everything is closed"
    if here[0] in "}]" and before.endswith(","):
        return f"must be JSON, got a comma before {here[0]!r}; remove the comma"
    if here.startswith(("//", "/*", "#")):
        return "must be JSON without comments, got a comment; remove it"
    if here[0] == "'":
        return 'must be JSON, got text in single quotes; use "double quotes"'
    word = re.match(r"True|False|None", here)
    if word:
        plain = {"True": "true", "False": "false", "None": "null"}[word[0]]
        return f"must be JSON, got {word[0]}; write {plain}"
    return f"must be JSON, got an error: {error.msg}"


def parse_yaml(text: bytes | str, source: str) -> dict[str, Any]:
    """Read YAML text that holds one mapping.

    Numbers such as ``1e-3`` are numbers, as in YAML 1.2 and JSON.

    Args:
        text: The content of a file.
        source: Its name, for messages.

    Raises:
        ConfigError: If it is not YAML, or names a key twice.
    """
    import yaml

    text = _decode(text, source)
    try:
        loader = _loader()(text)
        try:
            content = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise ConfigError(source, [_yaml_problem(text, error)]) from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        code = error.character
        character = chr(code) if isinstance(code, int) else code
        problem = f"line {line}: must be text, got the character {character!r}"
        raise ConfigError(source, [problem]) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(source, [f"file: must be YAML, got an error: {error}"]) from None
    return _mapping(content if content is not None else {}, source)


def _yaml_problem(text: str, error: "yaml.MarkedYAMLError") -> str:
    mark = error.problem_mark
    if mark is None:
        return f"file: {error.problem or error}"
    where = f"line {mark.line + 1}, column {mark.column + 1}"
    line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return f"{where}: must be indented with spaces, got a tab; use spaces"
    return f"{where}: {error.problem or error}"


def _mapping(content: object, source: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        problem = f"file: must be a mapping of keys to values, got {type(content).__name__}"
        raise ConfigError(source, [problem])
    return content


def _loader() -> "type[yaml.SafeLoader]":
    """A safe YAML loader with YAML 1.2 floats, string keys and no key given twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(
            self,
            node: yaml.MappingNode,
            deep: bool = False,  # noqa: FBT001, FBT002 - its base's
        ) -> dict[Hashable, Any]:
            seen: set[Hashable] = set()
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue
                key = self.construct_object(key_node, deep=True)
                mark = key_node.start_mark
                if not isinstance(key, str):
                    text = f"keys must be text, got {key!r}; put it in quotes"
                    raise yaml.constructor.ConstructorError(None, None, text, mark)
                if key in seen:
                    text = f"{key}: must be given once, got it more than once"
                    raise yaml.constructor.ConstructorError(None, None, text, mark)
                seen.add(key)
            return super().construct_mapping(node, deep=deep)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    # Dates stay text: no field wants a date object, and JSON has none.
    for first in "0123456789":
        Loader.yaml_implicit_resolvers[first] = [
            pair
            for pair in Loader.yaml_implicit_resolvers.get(first, [])
            if pair[0] != "tag:yaml.org,2002:timestamp"
        ]
    number = re.compile(
        r"^[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
        r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    )
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader


def as_mapping(source: str | PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    """A mapping as it is, a path by its content (YAML for ``.yaml`` and ``.yml``, else JSON)."""
    if isinstance(source, Mapping):
        return source
    if Path(source).suffix.lower() in (".yaml", ".yml"):
        return read_yaml(source)
    return read_json(source)
