"""Settings of a search, and the runs that get a candidate's settings."""

import json
from pathlib import Path

import pytest

from zerolab.errors import ConfigError
from zerotrial.extensions.autotune.candidates import Candidate, Layout
from zerotrial.extensions.autotune.settings import Settings, read_block
from zerotrial.extensions.autotune.subjects import (
    ExperimentSubject,
    ScriptSubject,
    with_overrides,
)

OVERRIDES = Candidate(4, 2, Layout(2), bucket=1000).overrides(data_ranks=2)


def test_deepspeed_block_is_read() -> None:
    block = {
        "enabled": True,
        "fast": False,
        "metric": "latency",
        "start_profile_step": 3,
        "end_profile_step": 8,
        "tuner_type": "gridsearch",
        "tuner_early_stopping": 5,
        "tuner_num_trials": 30,
        "min_train_micro_batch_size_per_gpu": 2,
        "max_train_micro_batch_size_per_gpu": 16,
        "num_tuning_micro_batch_sizes": 3,
        "results_dir": "results",
        "overwrite": False,
        "arg_mappings": {"gradient_accumulation_steps ": "--accumulation"},
    }
    settings, notes = read_block({"autotuning": block}, "ds.json", Settings())
    assert settings == Settings(
        metric="latency",
        method="grid",
        warmup=2,
        steps=6,
        patience=5,
        max_candidates=30,
        lowest=2,
        highest=16,
        results_dir=Path("results"),
        mappings={"gradient_accumulation_steps": "--accumulation"},
    )
    assert [note.partition(":")[0] for note in notes] == ["autotuning.num_tuning_micro_batch_sizes"]


def test_all_problems_of_a_block_are_reported() -> None:
    block = {
        "metric": ["speed"],
        "tuner_type": "bayes",
        "tuner_num_trials": 0,
        "fast": "yes",
        "results_dir": 3,
        "arg_mappings": [],
        "start_profile_step": 9,
        "end_profile_step": 5,
        "tuner": 1,
    }
    with pytest.raises(ConfigError) as error:
        read_block({"autotuning": block}, "ds.json", Settings())
    keys = {
        problem.partition(":")[0].removeprefix("autotuning.") for problem in error.value.problems
    }
    assert keys == set(block) - {"start_profile_step"}


def test_tuned_file_keeps_other_keys() -> None:
    content = {
        "autotuning": {"enabled": True},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}},
    }
    assert with_overrides(content, OVERRIDES) == {
        "bf16": {"enabled": True},
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 1000,
            "allgather_bucket_size": 1000,
        },
    }


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("ds.json").write_text(json.dumps({"train_batch_size": 16}))
    (tmp_path / "run").mkdir()
    return tmp_path


def test_script_gets_a_copy_of_its_file(script: Path) -> None:
    words = ["train.py", "--deepspeed_config=ds.json", "--micro", "1", "other.json"]
    mappings = {"train_micro_batch_size_per_gpu": "--micro", "train_batch_size": "--batch"}
    subject = ScriptSubject(Path("ds.json"), words, mappings=mappings)
    assert not subject.override_engine
    spec = subject.run_spec(script / "run", 2, OVERRIDES)
    assert spec.entrypoint is not None
    copy = script / "run" / "ds.json"
    assert spec.entrypoint.words[2:] == (
        "train.py", f"--deepspeed_config={copy}", "--micro", "4", "other.json", "--batch", "16",
    )  # fmt: skip
    assert json.loads(copy.read_text())["zero_optimization"]["stage"] == 2


def test_script_with_its_own_file_is_overridden_in_the_engine(script: Path) -> None:
    assert ScriptSubject(Path("ds.json"), ["train.py"]).override_engine


def test_experiment_gets_overrides_as_hyperparameters(tmp_path: Path) -> None:
    Path(tmp_path, "model.py").write_text("import zerotrial\nclass T(zerotrial.ZeroTrial): ...")
    Path(tmp_path, "ds.json").write_text(json.dumps({"train_batch_size": 16}))
    file = tmp_path / "experiment.yaml"
    text = """
        entrypoint: model:T
        hyperparameters:
          deepspeed_config: ds.json
          overwrite_deepspeed_args: {bf16: {enabled: true}, train_batch_size: 8}
        searcher: {name: single, metric: loss, max_length: {batches: 5}}
        resources: {slots_per_trial: 2}
    """
    file.write_text(text)
    subject = ExperimentSubject(file)
    assert subject.content == {"train_batch_size": 8, "bf16": {"enabled": True}}
    spec = subject.run_spec(tmp_path, 2, OVERRIDES)
    overrides = spec.hparams["overwrite_deepspeed_args"]
    assert overrides["bf16"] == {"enabled": True}
    assert overrides["zero_optimization"]["stage"] == 2
    assert spec.fit is not None
    assert spec.fit.checkpoint_policy == "none"
    file.write_text(text.replace("deepspeed_config: ds.json", "width: 3"))
    with pytest.raises(ConfigError, match=r"hyperparameters\.deepspeed_config: is missing"):
        ExperimentSubject(file)
