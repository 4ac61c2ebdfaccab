"""Entrypoints: parsing, and errors that are found before anything starts."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.config.memory_files import MemoryFiles
from zerolab.config import check_experiment
from zerolab.config.experiment.entrypoint import parse_entrypoint
from zerolab.config.experiment.model_files import FolderFiles
from zerolab.contract.spec import Command, TrialClass
from zerolab.errors import ConfigError
from zerolab.replacements import replacements

MODEL = """
from zerotrial import ZeroTrial
from elsewhere import Borrowed

class Base(ZeroTrial): ...
class MyTrial(Base): ...
class Plain: ...
def factory(): ...
Made = type("Made", (Base,), {})
if True:
    class Hidden(Base): ...
"""


def problems(entrypoint: Any, model: str = MODEL, **more: Any) -> list[str]:
    files = {"model_def.py": model.encode(), "pkg/inner.py": b"class T(ZeroTrial): ...", **more}
    files |= {"train.py": b"print()", "run.sh": b"echo"}
    searcher = {"name": "single", "metric": "loss", "max_length": 10}
    try:
        check_experiment({"entrypoint": entrypoint, "searcher": searcher}, MemoryFiles(files))
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("model_def:MyTrial", TrialClass("model_def", "MyTrial")),
        (" pkg.inner:T ", TrialClass("pkg.inner", "T")),
        ("python train.py --lr '1 2'", Command(("python", "train.py", "--lr", "1 2"))),
        (["python", "a b.py"], Command(("python", "a b.py"))),
        ("./run.sh", Command(("./run.sh",))),
    ],
)
def test_entrypoint_is_class_or_command(value: Any, expected: object) -> None:
    assert parse_entrypoint(value) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("model_def.MyTrial", "got 'model_def.MyTrial'; did you mean 'model_def:MyTrial'?"),
        ("pkg.inner.MyTrial", "did you mean 'pkg.inner:MyTrial'?"),
        ("model_def.py:MyTrial", "did you mean 'model_def:MyTrial'?"),
        ("./pkg/inner.py:MyTrial", "did you mean 'pkg.inner:MyTrial'?"),
        ("model_def:", "must be module:Class, as in an import, got 'model_def:'"),
        ("python 'train.py", "must be a command that can be split, got No closing quotation"),
        ([], "must be module:Class, or a command"),
        (
            "python3 -m determined.launch.deepspeed python3 train.py --epochs 3",
            "write python3 train.py --epochs 3, got",
        ),
    ],
)
@pytest.mark.needs_extension("source_checks")
def test_misspelt_class_is_rejected_with_correction(value: Any, message: str) -> None:
    (line,) = problems(value)
    assert line.startswith("entrypoint: ")
    assert message in line


@pytest.mark.parametrize(
    ("entrypoint", "message"),
    [
        (
            "model_def:MyTrail",
            "model_def.py has no class 'MyTrail'; its classes are: Base, MyTrial, Plain; "
            "did you mean 'MyTrial'?",
        ),
        (
            "model_deff:MyTrial",
            "there is no module 'model_deff' in the model directory; its modules are: "
            "model_def, pkg.inner, train; did you mean 'model_def'?",
        ),
        ("pkg.outer:T", "there is no module 'pkg.outer' in the model directory; its modules"),
        ("model_def:Plain", "Plain in model_def.py is not a ZeroTrial; derive it: class Plain("),
        ("model_def:factory", "factory in model_def.py is a function, not a class"),
        ("pkg.inner.t", "must be module:Class, got 'pkg.inner.t'; did you mean 'pkg.inner:t'?"),
        (
            "train.py --lr 1",
            "a file of the model directory, 'train.py'; write 'python train.py --lr",
        ),
        ("run.sh", "a file of the model directory, 'run.sh'; write './run.sh'"),
        ("MyTrial", "must be module:Class, got 'MyTrial'; did you mean 'model_def:MyTrial'?"),
        ("model_def", "or a program, got a module, 'model_def'; write 'model_def:Class'"),
        (
            "model_def/MyTrial",
            "must be module:Class or a program, got 'model_def/MyTrial', which is no file of the "
            "model directory; did you mean 'model_def:MyTrial'?",
        ),
        ("./model_def.py/MyTrial", "did you mean 'model_def:MyTrial'?"),
        ("pkg/inner/T", "did you mean 'pkg.inner:T'?"),
        ("python trian.py", "model_def.py, pkg/inner.py, train.py; did you mean 'train.py'?"),
        ("/opt/bin/python3.11 -u -X dev train --lr 1", "there is no file 'train' in the model"),
    ],
)
@pytest.mark.needs_extension("source_checks")
def test_missing_class_or_program_is_reported(entrypoint: str, message: str) -> None:
    (line,) = problems(entrypoint)
    assert line.startswith("entrypoint: ")
    assert message in line


@pytest.mark.parametrize(
    "entrypoint",
    ["model_def:MyTrial", "model_def:Borrowed", "model_def:Made", "model_def:Hidden", "pkg.inner:T",
     "json:Anything", "python ./train.py", "python3 -m anything", "python -c 1", "python -",
     "python -Wall -W error pkg", "python /opt/any.py", "python ../any.py", "python .", "python",
     "python -uW error -Bm anything", "python -Ic 1", "any", "ls"],
)  # fmt: skip
def test_imported_or_dynamic_class_is_accepted(
    entrypoint: str,
) -> None:
    assert problems(entrypoint) == []


PACKAGE = {
    "pkg/__init__.py": b"",
    "model_def/program": b"#!/bin/sh",
    "scripts/train.sh": b"",
}


@pytest.mark.needs_extension("source_checks")
def test_path_instead_of_module_is_rejected() -> None:
    (line,) = problems(["pkg/inner"], **PACKAGE)
    assert "got 'pkg/inner', which is no file" in line
    assert line.endswith("did you mean 'pkg.inner:Class'?")


@pytest.mark.parametrize(
    "entrypoint",
    ["./run.sh", "scripts/train.sh", "./model_def/program", "model_def/program", "scripts/make",
     "/model_def/MyTrial", "../model_def/MyTrial", "model_def/MyTrial --lr 1",
     "pkg/train.sh", "./not_there"],
)  # fmt: skip
def test_program_path_is_accepted(entrypoint: str) -> None:
    assert problems(entrypoint, **PACKAGE) == []


@pytest.mark.parametrize(
    "model",
    [
        "from elsewhere import *",
        "for name in ('Wanted',):\n    globals()[name] = type(name, (), {})",
        "import sys\nsetattr(sys.modules[__name__], 'Wanted', int)",
        "def __getattr__(name): ...",
        "def make():\n    global Wanted\n    Wanted = int\nmake()",
        "class Wanted: ...\nWanted = register(Wanted)",
        "@register\nclass Wanted: ...",
        "class Wanted(: a newer Python may read this",
    ],
)
def test_uncertain_source_is_accepted(model: str) -> None:
    assert problems("model_def:Wanted", model) == []


@pytest.mark.needs_extension("source_checks")
def test_module_in_pythonpath_is_accepted() -> None:
    searcher = {"name": "single", "metric": "loss", "max_length": 10}
    content = {
        "entrypoint": "shared_models:Big",
        "searcher": searcher,
        "environment": {"environment_variables": ["PYTHONPATH=/opt/models"]},
    }
    check_experiment(content, MemoryFiles({"model_def.py": b""}))
    del content["environment"]
    with pytest.raises(ConfigError, match="there is no module 'shared_models'"):
        check_experiment(content, MemoryFiles({"model_def.py": b""}))


OF_DETERMINED = b"""
import determined as det
from determined.pytorch import DataLoader, deepspeed as det_ds
from determined.experimental import client
import steps

with det.core.init(distributed=det.core.DistributedContext.from_torch_distributed()) as context:
    info = det.get_cluster_info()
    det_ds.Trainer(None, context).fit(det.util.nothing)
"""


@pytest.mark.needs_extension("determined")
def test_determined_names_are_reported_with_replacement() -> None:
    steps = b"from determined import core, keras\nimport train\ncore.init()"
    launched = "python3 -m determined.launch.torch_distributed python3 train.py --epochs 3"
    problems = problems_of(launched, {"train.py": OF_DETERMINED, "steps.py": steps})
    assert problems[0].startswith("entrypoint: ranks are started without Determined's launchers")
    message = [line.removeprefix("entrypoint: ").partition("; instead: ") for line in problems[1:]]
    assert {name: instead for name, _, instead in message} == {
        "train.py:3: determined.pytorch.DataLoader is of Determined": "`zerotrial.DataLoader`",
        "train.py:4: determined.experimental.client is of Determined": (
            "`zerolab.client.Client(url, token)`"
        ),
        "train.py:7: determined.core.init is of Determined": "`zerolab.core.init()`",
        "train.py:7: determined.core.DistributedContext is of Determined": (
            "leave it out: `zerolab.core.init()` finds the ranks from torchrun's variables"
        ),
        "train.py:8: determined.get_cluster_info is of Determined": (
            replacements("determined.")["get_cluster_info"]
        ),
        "train.py:9: determined.pytorch.deepspeed.Trainer is of Determined": "`zerotrial.Trainer`",
        "train.py:9: determined.util.nothing is of Determined": (
            "nothing takes its place; see docs/migrate/from_determined.md"
        ),
        "steps.py:1: determined.core is of Determined": "`zerolab.core`",
        "steps.py:1: determined.keras is of Determined": replacements("determined.")["keras"],
    }


@pytest.mark.parametrize(
    "source",
    [
        b"try:\n    import determined as det\nexcept ImportError:\n    det = None",
        b"def main():\n    import determined as det\n    det.core.init()",
        b"from determined.experimental import client\nclient.get_checkpoint('x').download()",
        b"import determined as det\nprint(det.LOG_FORMAT)",
        b"import undetermined.core\nundetermined.core.init()",
        b"from .determined import core",
        b"not Python",
        b"import determined as det\ndet.core.init(" + b"-" * 100_000 + b"1)",
    ],
)
def test_portable_script_is_accepted(source: bytes) -> None:
    assert problems_of("python train.py", {"train.py": source}) == []


@pytest.mark.parametrize(
    "module", ["determined.py", "src/determined/__init__.py", "src/determined/pytorch.py"]
)
@pytest.mark.needs_extension("determined")
def test_local_module_named_determined_is_accepted(module: str) -> None:
    script = "src/train.py"
    assert problems_of(f"python {script}", {script: OF_DETERMINED})
    assert problems_of(f"python {script}", {script: OF_DETERMINED, module: b""}) == []


@pytest.mark.parametrize(
    ("search_path", "refused"),
    [("lib", False), ("other::lib/", False), ("other", True), ("", True), ("../lib", False),
     ("/opt/lib", False)],
)  # fmt: skip
@pytest.mark.needs_extension("determined")
def test_determined_in_pythonpath_is_accepted(search_path: str, refused: bool) -> None:
    files = {"src/train.py": OF_DETERMINED, "lib/determined/__init__.py": b""}
    environment = {"environment_variables": [f"PYTHONPATH={search_path}"]}
    reported = problems_of("python src/train.py", files, environment=environment)
    assert bool(reported) is refused


@pytest.mark.parametrize(
    ("installed", "refused"),
    [(["determined.py"], False), (["determined/__init__.py"], False),
     (["determined/__init__.py", "determined/ipc.py"], True), (["determined/ipc.py"], True)],
)  # fmt: skip
@pytest.mark.needs_extension("determined")
def test_unrelated_determined_package_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: list[str], refused: bool
) -> None:
    for name in installed:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert bool(problems_of("python train.py", {"train.py": OF_DETERMINED})) is refused


def test_programs_in_real_directory_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "a/b/c/__main__.py").touch()
    (tmp_path / "zerolab.py").touch()
    searcher = {"name": "single", "metric": "loss", "max_length": 10}
    for entrypoint in ("python a/b/c", "zerolab"):
        check_experiment({"entrypoint": entrypoint, "searcher": searcher}, FolderFiles(tmp_path))


def problems_of(entrypoint: str, files: dict[str, bytes], **more: Any) -> list[str]:
    searcher = {"name": "single", "metric": "loss", "max_length": 10}
    content = {"entrypoint": entrypoint, "searcher": searcher, **more}
    try:
        check_experiment(content, MemoryFiles(files))
    except ConfigError as error:
        return error.problems
    return []


def test_model_is_never_imported() -> None:
    code = """
import sys
from zerolab.config import check_experiment
from zerolab.config.experiment.model_files import FolderFiles
import pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "model_def.py").write_text("print('IMPORTED')\\nclass T(ZeroTrial): ...")
searcher = {"name": "single", "metric": "loss", "max_length": 10}
check_experiment({"entrypoint": "model_def:T", "searcher": searcher}, FolderFiles(folder))
print("model_def" in sys.modules, "torch" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        == "False False\n"
    )


def launcher_problems(entrypoint: Any, **resources: Any) -> list[str]:
    content = {
        "entrypoint": entrypoint,
        "searcher": {"name": "single", "metric": "loss"},
        "resources": resources,
    }
    files = {"train.py": b"print()", "a b.py": b"", "hosts": b"a slots=2\nb slots=2\n"}
    try:
        check_experiment(content, MemoryFiles(files))
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("entrypoint", "name", "instead"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 1", "torchrun", "python train.py --lr 1"),
        (["/usr/bin/torchrun", "a b.py"], "torchrun", "python 'a b.py'"),
        ("torchrun --nnodes=1 train.py --nnodes 2", "torchrun", "python train.py --nnodes 2"),
        ("torchrun -m pkg.train -m 3", "torchrun", "python -m pkg.train -m 3"),
        ("A=1 torchrun train.py", "torchrun", "python train.py"),
        ("env A=1 B= torchrun train.py", "torchrun", "python train.py"),
        ("bash -c 'cd src && exec torchrun train.py; date'", "torchrun", "python train.py"),
        (["sh", "-ec", "torchrun train"], "torchrun", "python script.py"),
        (["sh", "-c", "torchrun train.py -n 1 2>&1 | tee a"], "torchrun", "python train.py -n 1"),
        (["sh", "-c", "(torchrun train.py) >log"], "torchrun", "python train.py"),
        (
            "python3 -um torch.distributed.run --standalone train.py",
            "python -m torch.distributed.run",
            "python train.py",
        ),
        (
            "python -W error -mtorch.distributed.launch train.py",
            "python -m torch.distributed.launch",
            "python train.py",
        ),
        ("deepspeed --num_nodes 2 train.py", "deepspeed", "python train.py"),
        ("accelerate launch --num_processes 2 train.py", "accelerate launch", "python train.py"),
        (
            "accelerate-launch --use_deepspeed --num_processes=1 train.py",
            "accelerate-launch",
            "python train.py",
        ),
    ],
)
@pytest.mark.needs_extension("source_checks")
def test_launcher_on_several_slots_is_rejected(entrypoint: Any, name: str, instead: str) -> None:
    (line,) = launcher_problems(entrypoint, slots_per_trial=2)
    assert line == (
        "entrypoint: must not start ranks, because Zerolab starts it on each of 2 "
        f"slots, got {name!r}, whose ranks would be started 2 times; write {instead!r} (the "
        "platform starts a rank on each slot), or set resources.slots_per_rank: 2 (one process has "
        f"that many slots of a machine, and {name} starts its ranks there)"
    )
    assert launcher_problems(entrypoint, slots_per_trial=2, slots_per_rank=2) == []
    assert launcher_problems(entrypoint, slots_per_trial=1) == []


@pytest.mark.parametrize(
    ("entrypoint", "resources", "message"),
    [
        ("torchrun train.py", {"slots_per_trial": 4, "slots_per_rank": 2}, "every 2 of 4 slots"),
        ("torchrun train.py", {"slots_per_trial": 4, "max_nodes": 2}, "slots_per_rank: 4 (one pro"),
        (
            "torchrun --nnodes=2 train.py",
            {"slots_per_trial": 4, "max_nodes": 2},
            "slots_per_rank: 2 (each of 2 processes has",
        ),
        ("deepspeed train.py", {"hostfile": "hosts"}, "each of 4 slots, got 'deepspeed'"),
        (
            f"torchrun --nnodes {'9' * 5000} train.py",
            {"slots_per_trial": 2},
            "started 2 times",
        ),
        (
            "torchrun --nnodes 2 train.py",
            {"slots_per_trial": 4, "max_nodes": 2, "slots_per_rank": 2},
            "",
        ),
        (
            "deepspeed --num_nodes 2 train.py",  # each starts the ranks of both
            {"slots_per_trial": 4, "max_nodes": 2, "slots_per_rank": 2},
            "started 2 times",
        ),
        (
            "deepspeed --no_ssh --num_nodes 2 train.py",
            {"slots_per_trial": 4, "max_nodes": 2, "slots_per_rank": 2},
            "",
        ),
        ("torchrun --nnodes 1:4 train.py", {"slots_per_trial": 4, "slots_per_rank": 2}, ""),
    ],
)
@pytest.mark.needs_extension("source_checks")
def test_launcher_once_per_machine_is_accepted(
    entrypoint: str, resources: dict[str, Any], message: str
) -> None:
    reported = launcher_problems(entrypoint, **resources)
    assert len(reported) == bool(message)
    assert message in "".join(reported)


@pytest.mark.needs_extension("source_checks")
def test_useless_slots_per_rank_is_not_advised() -> None:
    for entrypoint, resources in (
        ("deepspeed train.py", {"hostfile": "hosts"}),  # a rank on each slot of it
        ("zerolab launch train.py", {"slots_per_trial": 2}),  # a separate run
        ("python -m zerolab launch train.py", {"slots_per_trial": 2}),
    ):
        (line,) = launcher_problems(entrypoint, **resources)
        assert line.endswith("write 'python train.py' (the platform starts a rank on each slot)")


@pytest.mark.parametrize(
    "entrypoint",
    [
        "python train.py --launcher torchrun",
        "python -m zerotrial.extensions.deepspeed_api train.py",
        "python -c 'import torchrun'",
        "accelerate launch --num_processes 1 train.py",  # the script replaces the launcher
        "accelerate launch --num_processes 1 -m pkg.train --num_processes 8",
        "accelerate launch --cpu train.py",
        "accelerate env",
        "zerolab plan train.py",
        "echo torchrun",
        "torchrun --help",
        "./deepspeed train.py",  # a local file
        "tools/accelerate launch train.py",
        "bash run.sh",
        "bash '' x",
        "bash -c",
        "A=1",
        ["sh", "-c", "[ $LOCAL_RANK = 0 ] && torchrun train.py"],
        ["sh", "-c", "torchrun --nnodes 2 --node-rank $GROUP_RANK train.py"],
        ["sh", "-c", "torchrun 'train.py"],
        ["sh", "-c", "echo torchrun && python train.py"],
        ["sh", "-c", "deepspeed --version && python train.py"],
    ],
)
@pytest.mark.needs_extension("source_checks")
def test_platform_rank_command_is_not_a_launcher(entrypoint: Any) -> None:
    assert launcher_problems(entrypoint, slots_per_trial=2) == []
