"""One rank of a trial: exit codes, and the reason of a failure."""

import itertools
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.trial.helpers import last_checkpoint, make_spec, metrics
from zerolab.contract.outcome import Outcome, read_reason, write_reason
from zerolab.contract.spec import ENV_COLLECTIVE_TIMEOUT, RunSpec, TrialClass
from zerolab.errors import TrialError
from zerotrial.failures import exit_code_of
from zerotrial.process import harness
from zerotrial.process.entrypoint import load_trial_class
from zerotrial.ranks import collective_timeout_s, is_peer_failure

GOOD = """
    import pathlib, torch, zerotrial
    from torch import nn

    class MyTrial(zerotrial.ZeroTrial):
        def __init__(self, context):
            self.context = context
            {init}
            model = nn.Linear(1, 1)
            config = {{"train_batch_size": 2, "optimizer": {{"type": "AdamW"}}}}
            engine = zerotrial.initialize(model=model, config=config)[0]
            self.engine = context.wrap_model_engine(engine)

        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            {train}
            loss = self.engine(next(dataloader_iter)).square().mean()
            self.engine.backward(loss)
            self.engine.step()
            return loss

        def evaluate_batch(self, dataloader_iter):
            return {{"validation_loss": self.engine(next(dataloader_iter)).mean()}}

        def build_training_data_loader(self):
            return zerotrial.DataLoader(torch.ones(8, 1), batch_size=2)

        build_validation_data_loader = build_training_data_loader

    class NotATrial: ...
"""


_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _own_process_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def make_run(path: Path, init: str = "pass", train: str = "pass", **fields: Any) -> RunSpec:
    """Make a run of the class above with user code inserted."""
    module = f"model_{next(_numbers)}"
    config = {
        "entrypoint": f"{module}:MyTrial",
        "searcher": {"metric": "validation_loss", "max_length": {"batches": 4}},
        "scheduling_unit": 1,
    }
    config |= fields.pop("config", {})
    config["entrypoint"] = config["entrypoint"].replace("MODULE", module)
    spec = make_spec(path / module, config=config, **fields)
    code = textwrap.dedent(GOOD).format(init=init, train=train)
    (Path(spec.model_dir) / f"{module}.py").write_text(code)
    return spec


def reason(spec: RunSpec) -> tuple[int, str]:
    reason_record = json.loads((Path(spec.run_dir) / "reason.json").read_text())
    return reason_record["exit_code"], reason_record["reason"]


def test_trial_runs_to_exit_code_0(tmp_path: Path) -> None:
    spec = make_run(tmp_path)
    assert harness.run(spec) == 0
    assert sorted(metrics(Path(spec.run_dir), "training")) == [1, 2, 3, 4]
    assert last_checkpoint(Path(spec.run_dir)).steps_completed == 4
    assert not (Path(spec.run_dir) / "reason.json").exists()


def test_auto_values_in_engine_config_are_filled(tmp_path: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    content = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": optimizer,
        "scheduler": schedule | {"params": schedule["params"] | {"warmup_num_steps": "auto"}},
    }
    init = (
        f"filled = zerotrial.initialize(model=nn.Linear(1, 1), config={content!r})[0].config; "
        "pathlib.Path('filled.json').write_text(filled.model_dump_json())"
    )
    arguments = {"per_device_train_batch_size": 3, "learning_rate": 0.25, "warmup_ratio": 0.5}
    spec = make_run(tmp_path, init, hparams={"training_arguments": arguments})
    assert harness.run(spec) == 0
    filled = json.loads((Path(spec.model_dir) / "filled.json").read_text())
    assert filled["train_micro_batch_size_per_gpu"] == 3
    assert filled["optimizer"]["params"] == {"lr": 0.25}
    assert filled["scheduler"]["params"] == {"total_num_steps": 4, "warmup_num_steps": 2}


def test_harness_refuses_removed_backend(tmp_path: Path) -> None:
    spec = make_run(tmp_path)
    stored = msgspec.structs.replace(spec, config={**spec.config, "backend": "deepspeed"})
    assert harness.run(stored) == 64
    assert "backend: is not supported; remove it to train with Zerolab's engine" in reason(spec)[1]


def test_test_mode_trains_one_batch(tmp_path: Path) -> None:
    spec = make_run(tmp_path, test_mode=True)
    assert harness.run(spec) == 0
    assert last_checkpoint(Path(spec.run_dir)).steps_completed == 1


MISTAKES = [
    # init, train, config, exit code, fragments of the message
    ("raise ValueError('hidden must be even')", "pass", {}, 64,
     [".py:8: ValueError: hidden must be even", "(in: raise ValueError("]),
    ("self.width = context.get_hparam('widht')", "pass", {}, 64,
     [".py:8: unknown hyperparameter 'widht'", "(in: self.width = context.get_hparam("]),
    ("context.wrap_model_engine(3)", "pass", {}, 64,
     [".py:8: wrap_model_engine: must get an engine"]),
    ("pass", "return 'words'", {}, 64, ["train_batch: must return the loss as a tensor"]),
    ("pass", "return torch.tensor(0.0)", {}, 64, ["must train 1 micro-batch(es) a batch"]),
    ("pass", "raise zerotrial.InvalidHP('too deep')", {}, 65, [".py:15: too deep"]),
    ("pass", "torch.zeros(2) @ torch.zeros(3)", {}, 1,
     [".py:15: RuntimeError: ", "(in: torch.zeros(2) @ torch.zeros(3))"]),
    ("pass", "raise torch.OutOfMemoryError('CUDA out of memory')", {}, 1,
     ["OutOfMemoryError: CUDA out of memory", "; `zerolab plan` shows", "offload_optimizer"]),
    ("pass", "raise MemoryError", {}, 1,
     [": MemoryError (in: raise MemoryError)", "; `zerolab plan` shows"]),
    ("pass", "pass", {"entrypoint": "MODULE:MyTrail"}, 64,
     ["has no class 'MyTrail'; did you mean 'MyTrial'?"]),
    ("pass", "pass", {"entrypoint": "MODULE:NotATrial"}, 64,
     ["NotATrial in ", "is not a ZeroTrial; derive it"]),
    ("pass", "pass", {"entrypoint": "nowhere:MyTrial"}, 64,
     ["there is no module 'nowhere' in the model directory"]),
    ("pass", "pass", {"searcher": {"metric": "x"}}, 64, ["searcher.max_length: is missing"]),
]  # fmt: skip


@pytest.mark.parametrize(("init", "train", "config", "code", "fragments"), MISTAKES)
def test_user_error_reason_names_file_and_line(
    tmp_path: Path, caplog, init: str, train: str, config: dict, code: int, fragments: list[str]
) -> None:
    spec = make_run(tmp_path, init, train, config=config)
    assert harness.run(spec) == code
    actual_code, message = reason(spec)
    assert actual_code == code
    for fragment in fragments:
        assert message.count(fragment) == 1, message
    assert "\n" not in message or "problem(s)" in message
    assert [r for r in caplog.records if r.exc_info]  # the traceback is in the logs


def test_reason_names_failed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_run(tmp_path, "raise ValueError('not here')")
    monkeypatch.setenv("RANK", "1")
    assert harness.run(msgspec.structs.replace(spec, slots=2)) == 64
    assert reason(spec)[1].startswith("rank 1: model_")
    reason_record = read_reason(Path(spec.run_dir))
    assert reason_record is not None
    assert reason_record.rank == 1


def test_relayed_reason_keeps_original_rank(tmp_path: Path) -> None:
    write_reason(tmp_path, 64, "rank 0: save_checkpoint(): 1 problem(s)", rank=1)
    assert read_reason(tmp_path) == Outcome(64, "rank 0: save_checkpoint(): 1 problem(s)", 0)


def test_import_error_names_the_line(tmp_path: Path) -> None:
    for content, line, text in (
        ("import zerotrial\nx = = 3\n", 2, "SyntaxError: invalid syntax (in: x = = 3)"),
        ("import zerotrial\nimport nosuchmodule\n", 2, "No module named 'nosuchmodule'"),
    ):
        spec = make_run(tmp_path)
        module = spec.config["entrypoint"].partition(":")[0]
        (Path(spec.model_dir) / f"{module}.py").write_text(content)
        assert harness.run(spec) == 64
        _, message = reason(spec)
        assert message.startswith(f"{module}.py:{line}: ")
        assert text in message


def test_missing_abstract_method_is_named(tmp_path: Path) -> None:
    spec = make_run(tmp_path)
    module = spec.config["entrypoint"].partition(":")[0]
    file = Path(spec.model_dir) / f"{module}.py"
    file.write_text(file.read_text().replace("def train_batch", "def train_batches"))
    assert harness.run(spec) == 64
    assert "MyTrial: must define train_batch" in reason(spec)[1]


@pytest.mark.parametrize(
    ("module", "file"), [("pkg_in_a_folder", "pkg_in_a_folder/__init__.py"), ("json", "json")]
)
def test_missing_class_names_the_module_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, file: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "pkg_in_a_folder").mkdir()
    (tmp_path / "pkg_in_a_folder/__init__.py").touch()
    with pytest.raises(TrialError, match=f": {file} has no class 'Missing'"):
        load_trial_class(TrialClass(module, "Missing"), tmp_path)


def test_training_error_exits_1_and_resumes(tmp_path: Path) -> None:
    path = tmp_path / "once"
    path.touch()
    spec = make_run(
        tmp_path,
        train=f"batch_idx == 2 and pathlib.Path({str(path)!r}).touch(exist_ok=False)",
        config={"min_checkpoint_period": {"batches": 1}},
    )
    assert harness.run(spec) == 1
    assert "FileExistsError" in reason(spec)[1]
    path.unlink()
    latest = last_checkpoint(Path(spec.run_dir))
    assert latest.steps_completed == 2
    assert harness.run(msgspec.structs.replace(spec, latest_checkpoint=latest)) == 0
    assert sorted(metrics(Path(spec.run_dir), "training")) == [1, 2, 3, 4]


def test_peer_and_network_errors_are_not_user_errors() -> None:
    connection_error = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    error = ValueError("could not build")
    error.__cause__ = connection_error
    assert is_peer_failure(error)
    assert exit_code_of(error, building=True) == 1
    unreachable = OSError("no model of that name can be fetched")
    unreachable.__context__ = ConnectionRefusedError(111, "refused")
    assert exit_code_of(unreachable, building=True) == 1
    assert exit_code_of(ValueError("mine"), building=True) == 64
    assert exit_code_of(ValueError("mine"), building=False) == 1


def test_collective_timeout_from_environment(monkeypatch) -> None:
    monkeypatch.delenv(ENV_COLLECTIVE_TIMEOUT, raising=False)
    assert collective_timeout_s() == 600
    monkeypatch.setenv(ENV_COLLECTIVE_TIMEOUT, "12.5")
    assert collective_timeout_s() == 12.5
    for bad in ("soon", "0", "-1"):
        monkeypatch.setenv(ENV_COLLECTIVE_TIMEOUT, bad)
        with pytest.raises(ValueError, match="must be a number of seconds > 0"):
            collective_timeout_s()


def test_harness_without_run_spec_prints_usage(monkeypatch, capsys) -> None:
    monkeypatch.delenv("ZEROLAB_RUN_SPEC", raising=False)
    assert harness.main() == 2
    assert "the launcher starts this program" in capsys.readouterr().err
