"""Messages for errors in files: position, value and remedy."""

from pathlib import Path
from typing import Any

import pytest

from zerolab.cli.submit import read_submission
from zerolab.config import check_file
from zerolab.config.experiment.experiment_config import parse_experiment
from zerolab.config.experiment.model_files import FolderFiles
from zerolab.config.files import experiment_file, parse_yaml, read_yaml
from zerolab.contract.spec import Command
from zerolab.errors import ConfigError
from zerolab.extensions.config_checks.source_checks import entrypoint_problem, source_problems

EXPERIMENT = """name: m
entrypoint: model_def:T
searcher: {name: single, metric: accuracy, max_length: {batches: 60}}
resources: {slots_per_trial: 1}
"""


def problems_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "file")
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "position", "remedy"),
    [
        (
            "name: m\nresources {slots_per_trial: 1}\n",
            "line 2",
            "`resources: {slots_per_trial: ...`",
        ),
        ("name: m\nentrypoint x\n", "line 2", "`entrypoint: x`"),
        ("resources\n  slots_per_trial: 1\n", "line 1", "`resources:`"),
        ("name:m\nentrypoint: y\n", "line 1", "`name: m`"),
        ("length: {batches:60}\n", "line 1", "`batches: 60`"),
        ("a:\n  name: single\n  metric loss\n  x: 3\n", "line 3", "`metric: loss`"),
        ("a:\n  b: 1\n   c: x\n", "line 3", "align it with `b`"),
        ("a: single\n  metric: x\n", "line 2", "remove the value 'single' of `a`"),
        ("a:\n  b: 1\n c: x\n", "line 3", "like line 2 (2 spaces), or by 0 spaces, got 1"),
        ("a:\n  - 1\n  b: 3\n", "line 3", "indent the list below its key"),
        ("text: lr: 3\n", "line 1", "`text: 'lr: 3'`"),
        ("a: {b: 1\nc: 3\n", "line 1, column 4", "add the '}'"),
        ("a: [1, 2\nc: 3\n", "line 1, column 4", "add the ']'"),
        ("a: [1, 2]]\n", "line 1, column 10", "remove it"),
        ("a: 'x\nb: 3\n", "line 1, column 4", "add the closing quote"),
        ("a: 'it's'\n", "line 1, column 8", "double a quote inside it"),
        ("a: @x\n", "line 1, column 4", "put the value in quotes"),
        ("a: *foo\n", "line 1, column 4", "put the value in quotes"),
        ("a: !x y\n", "line 1, column 4", "put the value in quotes"),
    ],
)
def test_yaml_error_has_line_and_remedy(text: str, position: str, remedy: str) -> None:
    (problem,) = problems_of(text)
    assert problem.startswith((f"{position}:", f"{position},"))
    assert remedy in problem
    assert "mapping values" not in problem


def test_valid_yaml_is_read() -> None:
    text = "a: {b: {}, c: [], d: '', 'e:f': , 'g {h': 1}\n? i\n: 2\nj:\nk: {b c: 3, l: }\n"
    assert parse_yaml(text, "file") == {
        "a": {"b": {}, "c": [], "d": "", "e:f": None, "g {h": 1},
        "i": 2,
        "j": None,
        "k": {"b c": 3, "l": None},
    }


def test_program_as_experiment_file(tmp_path: Path) -> None:
    script = tmp_path / "model_def.py"
    script.write_text("class T: pass\n")
    with pytest.raises(ConfigError, match=r"got a Python file; write one, .* or run it alone"):
        experiment_file(script)
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    with pytest.raises(ConfigError, match=r"got a Python file; use .*/experiment.yaml"):
        experiment_file(script)


def test_missing_file_names_similar_files(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    with pytest.raises(ConfigError, match=r"did you mean 'experiment.yaml'"):
        read_yaml(tmp_path / "experimnt.yaml")
    with pytest.raises(ConfigError, match=r"its .yaml and .yml files are: experiment.yaml"):
        read_yaml(tmp_path / "nothere.yaml")
    with pytest.raises(ConfigError, match=r"folder .*/none, which does not exist"):
        read_yaml(tmp_path / "none" / "experiment.yaml")


@pytest.mark.parametrize("length", ["{batches: -5}", "{epochs: two}", "-5"])
def test_invalid_length_is_one_problem(tmp_path: Path, length: str) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(EXPERIMENT.replace("{batches: 60}", length))
    (tmp_path / "model_def.py").write_text("class T(object): pass\n")
    with pytest.raises(ConfigError) as caught:
        check_file(file)
    assert len(caught.value.problems) == 1, caught.value.problems
    if "-5" in length:
        assert "must be a positive number of batches or epochs, got -5" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "problems"),
    [
        (
            "singel",
            [
                "searcher.max_length: must be a positive number of batches or epochs, got 0",
                "searcher.metrik: unknown key; did you mean 'metric'?",
                "searcher.name: must be one of ",
            ],
        ),
        ("zork", ["searcher.metrik: unknown key; did you mean 'metric'?", "searcher.name: "]),
    ],
)
def test_wrong_searcher_hides_no_problem(tmp_path: Path, name: str, problems: list[str]) -> None:
    file = tmp_path / "experiment.yaml"
    block = f"{{name: {name}, metrik: accuracy, max_length: 0}}"
    text = f"entrypoint: model_def:T\nsearcher: {block}\nmin_checkpoint_period: -1\n"
    file.write_text(text)
    (tmp_path / "model_def.py").write_text("class T(object): pass\n")
    with pytest.raises(ConfigError) as caught:
        check_file(file)
    expected = ["min_checkpoint_period: must be at least 0 batches or epochs, got -1", *problems]
    assert len(caught.value.problems) == len(expected), caught.value.problems
    assert all(map(str.startswith, caught.value.problems, expected)), caught.value.problems


@pytest.mark.parametrize(
    ("entrypoint", "files", "problem"),
    [
        ("model_def:T", {"model_def.py": "class T\n  pass\n"}, "model_def.py:1: SyntaxError"),
        ("model_def:T", {"model_def.py": "import n\n", "n.py": "def f(:\n"}, "n.py:1: SyntaxError"),
        ("a.b:T", {"a/__init__.py": "", "a/b.py": "x = (\n"}, "a/b.py:1: SyntaxError"),
        ("python train.py", {"train.py": "if x:\nprint()\n"}, "train.py:2: IndentationError"),
        ("python s/t.py", {"s/t.py": "import u\n", "s/u.py": "x = = 1\n"}, "s/u.py:1: SyntaxError"),
        ("model_def:T", {"model_def.py": "from .nets import N\n"}, "write `from nets import N`"),
        ("python t.py", {"t.py": "from . import nets\n"}, "write `import nets`"),
    ],
)
def test_check_reads_source_files(
    tmp_path: Path, entrypoint: str, files: dict[str, str], problem: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (reported,) = source_problems(entrypoint, FolderFiles(tmp_path))
    assert problem in reported


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("trian.py", "its Python files are: train.py, utils.py; did you mean 'train.py'?"),
        ("evaluation_of_models.py", "its Python files are: train.py, utils.py"),
        ("scripts/train.py", "its Python files are: train.py, utils.py; did you mean 'train.py'?"),
    ],
)
def test_missing_script_lists_files(tmp_path: Path, script: str, problem: str) -> None:
    for name in ("train.py", "utils.py"):
        (tmp_path / name).write_text("x = 1\n")
    command = Command(("python", script))
    reported = entrypoint_problem(command, FolderFiles(tmp_path), {})
    assert reported == f"there is no file {script!r} in the model directory; {problem}"


def test_missing_engine_file_lists_files(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text(
        f"{EXPERIMENT}hyperparameters: {{deepspeed_config: ds_confg.json}}\n"
    )
    (tmp_path / "model_def.py").write_text("import x\nclass T(x.Y): pass\n")
    (tmp_path / "ds_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"got 'ds_confg.json'.*did you mean 'ds_config.json'"):
        check_file(tmp_path / "experiment.yaml")


def test_folder_without_experiment_file_names_init(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no YAML file; .*`zerolab init`"):
        experiment_file(tmp_path)
    (tmp_path / "search.yaml").write_text(EXPERIMENT)
    with pytest.raises(ConfigError, match=r"YAML files are: search.yaml; give one of them"):
        experiment_file(tmp_path)


@pytest.mark.parametrize(
    ("entrypoint", "files"),
    [
        ("a.b:T", {"a/__init__.py": "", "a/b.py": "from .c import x\n", "a/c.py": "x = 1\n"}),
        ("/opt/other/bin/python t.py", {"t.py": "print 'x'\n"}),
        ("python t.py", {"t.py": "try:\n    import u\nexcept Exception: pass\n", "u.py": "x ="}),
    ],
)
def test_check_accepts_source_files(tmp_path: Path, entrypoint: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert source_problems(entrypoint, FolderFiles(tmp_path)) == []


def test_set_overrides_experiment_file(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(EXPERIMENT)
    (tmp_path / "model_def.py").write_text("import zerotrial\nclass T(zerotrial.ZeroTrial): pass\n")
    content, _ = read_submission(file, None, None, ["searcher.max_length.batches=5", "name=x"])
    assert content["name"] == "x"
    assert content["searcher"]["max_length"] == {"batches": 5}
    assert content["searcher"]["metric"] == "accuracy"
    with pytest.raises(ConfigError, match="max_restart: unknown key; did you mean 'max_restarts'"):
        read_submission(file, None, None, ["max_restart=5"])
    with pytest.raises(ConfigError, match="--set: must be KEY=VALUE"):
        read_submission(file, None, None, ["max_restarts"])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_lenght": 5}, "searcher.max_lenght: unknown key; did you mean 'max_length'?"),
        (
            {"metrik": "loss", "max_length": 5},
            "searcher.metrik: unknown key; did you mean 'metric'?",
        ),
        (
            {"name": "random", "metric": "loss", "max_length": 5, "max_trails": 3},
            "searcher.max_trails: unknown key; did you mean 'max_trials'?",
        ),
    ],
)
def test_misspelt_key_is_one_problem(changes: dict[str, Any], problem: str) -> None:
    content = {
        "entrypoint": "model_def:Trial",
        "hyperparameters": {"deepspeed_config": "ds_config.json"},
        "searcher": {"name": "single"} | changes,
    }
    assert parse_experiment(content).problems == [problem]


def test_missing_keys_of_other_blocks_are_reported() -> None:
    content = {"entrypoint": "model_def:Trial", "max_lenght": 3, "searcher": {"name": "single"}}
    required, *_ = [line for line in parse_experiment(content).problems if "is required" in line]
    assert required.startswith("searcher.max_length: is required for a trial class")
