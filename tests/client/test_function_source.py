"""Submission of Python functions: their source, parameters and refusals."""

import functools
import importlib.util
import linecache
import os
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.client.helpers import make_spec
from zerolab.client.function_source import function_config, function_files
from zerolab.client.submission import read_source
from zerolab.contract.spec import ENV_RUN_SPEC, write_run_spec
from zerolab.errors import ConfigError

SEARCHER = {"name": "single"}
MODULE = """
import functools
import json

def logged(function):
    @functools.wraps(function)
    def wrapper(**hparams):
        with open("result.json", "w") as file:
            json.dump(hparams, file)
        return function(**hparams)
    return wrapper

@logged
def train(lr, layers={"width": 8}, name="a", seed=3):
    assert layers["width"] == 16
"""
CELL = """
import json
SCALE = 2
SIZES = [SCALE, 3]

class Net:
    size = SIZES[0]

    def run(self, value):
        return math.sqrt(value) * self.size * sum(x for x in SIZES)

def train(lr):
    local = Net()
    print(local.run(lr), Path)

experiment = client.submit(train, {})
"""


def module_function(folder: Path, name: str, text: str = MODULE) -> Callable[..., Any]:
    file = folder / f"{name.replace('.', '/')}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.train  # type: ignore[no-any-return]


def cell_function(text: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    """Define ``train`` as IPython does: its source is in linecache only."""
    text = text.replace("experiment = ", "experiment = None #")
    linecache.cache["<cell>"] = (len(text), None, text.splitlines(keepends=True), "<cell>")
    namespace = {"__name__": "__main__", **names}
    exec(compile(text, "<cell>", "exec"), namespace)
    return namespace["train"]  # type: ignore[no-any-return]


def test_function_of_module_runs(tmp_path: Path) -> None:
    train = module_function(tmp_path / "source", "digits_module")
    space = {"lr": {"type": "log", "minval": -3, "maxval": 0}, "layers": {"width": 16}}
    config = function_config(train, {"hyperparameters": space, "searcher": SEARCHER})
    assert config["name"] == "train"
    assert config["hyperparameters"] == {"name": "a", "seed": 3, **space}
    files = function_files(train)
    assert list(files) == ["digits_module.py"]
    run = tmp_path / "run"
    run.mkdir()
    (run / "digits_module.py").write_bytes(files["digits_module.py"])  # type: ignore[arg-type]
    hparams = {"lr": 0.1, "layers": {"width": 16}, "name": "a", "seed": 3}
    write_run_spec(make_spec(run, hparams=hparams), run / "run.json")
    command = [sys.executable, *config["entrypoint"][1:]]
    environment = os.environ | {ENV_RUN_SPEC: str(run / "run.json")}
    subprocess.run(command, cwd=run, env=environment, check=True, timeout=60)
    assert (run / "result.json").read_text() == (
        '{"lr": 0.1, "layers": {"width": 16}, "name": "a", "seed": 3}'
    )


def test_function_of_package_brings_its_files(tmp_path: Path) -> None:
    (tmp_path / "my_package" / "models").mkdir(parents=True)
    for name in ("__init__.py", "models/__init__.py", "data.py"):
        (tmp_path / "my_package" / name).write_text("")
    train = module_function(tmp_path, "my_package.models.digits")
    assert sorted(function_files(train)) == [
        "my_package/__init__.py",
        "my_package/data.py",
        "my_package/models/__init__.py",
        "my_package/models/digits.py",
    ]


def test_package_files_respect_ignore_files(tmp_path: Path) -> None:
    models = tmp_path / "my_package" / "models"
    models.mkdir(parents=True)
    for name in ("__init__.py", "private.py", "models/__init__.py", "models/old.py"):
        (tmp_path / "my_package" / name).write_text("")
    (tmp_path / ".zerolabignore").write_text("my_package/private.py\n")
    (models / ".gitignore").write_text("old.py\n")
    train = module_function(tmp_path, "my_package.models.digits")
    assert set(function_files(train)) == {
        "my_package/__init__.py",
        "my_package/models/__init__.py",
        "my_package/models/digits.py",
    }
    (models / ".zerolabignore").write_text("digits.py\n")
    with pytest.raises(ConfigError, match=r"must not be excluded by .* with a line `!digits.py`"):
        function_files(train)


def test_function_of_cell_brings_what_it_needs() -> None:
    names = {"math": __import__("math"), "Path": Path}
    files = function_files(cell_function(CELL, names))
    source = files["notebook_cell.py"]
    assert isinstance(source, str)
    for line in ("import math as math", "SIZES = [SCALE, 3]", "class Net:", "def train(lr):"):
        assert line in source.splitlines()
    assert "json" not in source
    assert "client" not in source
    module = types.ModuleType("notebook_cell")
    exec(source, module.__dict__)
    module.train(4.0)


def test_function_of_cell_names_other_cells() -> None:
    train = cell_function("def train(lr):\n    return pixels + helper(lr)\n", {"pixels": [1]})
    with pytest.raises(ConfigError, match=r"train\(\) uses helper, pixels of other cells; define"):
        function_files(train)


def nested() -> Callable[..., Any]:
    def train() -> None: ...

    return train


class Trainer:
    def train(self) -> None: ...

    def __call__(self) -> None: ...


async def coroutine() -> None: ...


def positional(lr: float, /) -> None: ...


def train_two(lr: float, width: int = 8) -> None: ...


@pytest.mark.parametrize(
    ("source", "config", "message"),
    [
        (lambda lr: lr, {}, "got a lambda; write it as `def`"),
        (nested(), {}, r"got train\(\), which is defined in a function; define it at the top"),
        (Trainer.train, {}, r"got the method Trainer\.train\(\); write a function"),
        (Trainer(), {}, "got Trainer; write `def train"),
        (Trainer, {}, "got type; write `def train"),
        (functools.partial(train_two, 1), {}, "got partial; write `def train"),
        (print, {}, "got builtin_function_or_method; write"),
        (coroutine, {}, r"got coroutine\(\), a coroutine or generator"),
        (positional, {"hyperparameters": {"lr": 1}}, "parameter 'lr' must accept a keyword"),
        (train_two, {}, r"hyperparameters\.lr: must be set; train_two\(\) requires it"),
        (
            train_two,
            {"hyperparameters": {"lr": 1, "depth": 2}, "entrypoint": "x y"},
            r"depth: must be a parameter of train_two\(\), which has lr, width(.|\n)*entrypoint: ",
        ),
    ],
)
def test_submit_refuses(source: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_source(source, config)


def test_submit_is_refused_while_its_module_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = module_function(tmp_path, "unguarded")
    monkeypatch.setattr(sys.modules["__main__"], "importing", "unguarded", raising=False)
    with pytest.raises(ConfigError, match="must not be called while a run imports unguarded; move"):
        read_source(train, {"hyperparameters": {"lr": 1}})
