"""``{hydra_overrides}``: a script gets its hyperparameters as overrides of the real Hydra."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolab.contract.hparam_reads import read_unread, warn_of_unread
from zerolab.contract.spec import Command, RunSpec
from zerolab.errors import ConfigError
from zerolab.extensions.hydra_overrides import expand
from zerotrial.process.launcher import _rank_command

pytestmark = pytest.mark.needs_extension("hydra_overrides")

COMMAND = ("python", "train.py", "{hydra_overrides}", "--config-name=config")
SCRIPT = """
import json

import hydra
from omegaconf import OmegaConf


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg):
    print(json.dumps(OmegaConf.to_container(cfg, resolve=True)))


main()
"""
CONFIG = """
lr: 1
model: {dim: 1, layers: [], name: a, options: {}}
ratio: 1.0
flag: null
"""
PARTS = ["\\", "'", '"', "${", "$", "}", "a", " ", ",", "=", "\n", "é", "null", "["]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("k"), inner, min_size=1),
    max_leaves=4,
)


def run_spec(directory: Path, hparams: dict[str, Any], config: dict[str, Any]) -> RunSpec:
    return RunSpec(
        experiment_id=1, trial_id=1, run_id=1, config=config, hparams=hparams, trial_seed=0,
        slots=1, model_dir=str(directory), run_dir=str(directory), checkpoint_dir=str(directory),
        entrypoint=Command(COMMAND),
    )  # fmt: skip


def test_command_without_placeholder_is_unchanged() -> None:
    assert expand(["python", "train.py"], {"a b": 1}) == ["python", "train.py"]


def test_rank_command_has_overrides(tmp_path: Path) -> None:
    hparams = {"lr": 1e-05, "model": {"dim": 64, "layers": [1, "b"]}, "flag": None, "fast": True}
    spec = run_spec(tmp_path, hparams, {})
    command = _rank_command(spec)
    assert command is not None
    assert command[command.index("train.py") + 1 :] == [
        "lr=1e-05", "model.dim=64", "model.layers=[1,'b']", "flag=null", "fast=true",
        "--config-name=config",
    ]  # fmt: skip


def test_names_that_hydra_cannot_override_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        expand(COMMAND, {"a b": 1, "c": [{"d e": 2}], "+new": 3, "db@x": "y"})
    first, second = caught.value.problems
    assert first.startswith("hyperparameters.a b: the name must be letters, digits")
    assert second.startswith("hyperparameters.c: the key must be letters, digits")


def test_overridden_hyperparameters_count_as_read(tmp_path: Path) -> None:
    space = {"lr": {"type": "double", "minval": 0, "maxval": 1}}
    config = {"hyperparameters": space}
    spec = run_spec(tmp_path, {"lr": 0.5}, config)
    warn_of_unread(spec)
    assert read_unread(Path(spec.run_dir)) is None


def test_script_gets_nested_names_and_special_characters(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text(CONFIG)
    hparams: dict[str, Any] = {
        "lr": 1e-05,
        "model": {"dim": 64, "layers": [8, [4, 2]], "name": "it's \\ a=b, ${lr}", "options": {}},
        "ratio": float("inf"),
        "flag": True,
        "+extra": {"text": "null", "items": [{"k": "x:y"}]},
    }
    words = expand(COMMAND, hparams)
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = {key: value for key, value in hparams.items() if key != "+extra"}
    assert json.loads(done.stdout) == expected | {"extra": hparams["+extra"]}


@settings(max_examples=150, deadline=None)
@given(value=VALUES)
def test_values_survive_hydra_and_omegaconf(value: Any) -> None:
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser")
    from omegaconf import OmegaConf

    (override,) = parser.OverridesParser.create().parse_overrides(
        expand(["{hydra_overrides}"], {"x": [value]})
    )
    config = OmegaConf.create({override.key_or_group: override.value()})
    assert OmegaConf.to_container(config, resolve=True) == {"x": [value]}
