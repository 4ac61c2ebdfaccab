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

__all__ = ["parse_json", "parse_yaml", "read_json", "read_yaml"]


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

    try:
        content = json.loads(text, object_pairs_hook=collect, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        problem = f"{where}: must be JSON without comments, got an error: {error.msg}"
        raise ConfigError(source, [problem]) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(source, [f"file: must be JSON in UTF-8, got an error: {error}"]) from None
    if twice:
        problems = [f"{key}: must be given once, got it more than once" for key in twice]
        raise ConfigError(source, problems)
    return _mapping(content, source)


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

    loader = _loader()(text)
    try:
        content = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "file"
        raise ConfigError(source, [f"{where}: {error.problem or error}"]) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(source, [f"file: must be YAML, got an error: {error}"]) from None
    finally:
        loader.dispose()
    return _mapping(content if content is not None else {}, source)


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
