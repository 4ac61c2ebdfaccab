"""Unknown training arguments are rejected before anything starts, if that is certain."""

import dataclasses
import importlib.util
from typing import Any

import pytest

from tests.config.memory_files import MemoryFiles
from zerolab.config import check_experiment
from zerolab.errors import ConfigError
from zerolab.extensions.deepspeed_config.training_arguments import _installed_names

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)

SCRIPT = "from transformers import Trainer, TrainingArguments\nTrainingArguments('out')\n"


def problems(arguments: dict[str, Any], script: str = SCRIPT, **more: Any) -> list[str]:
    content = {
        "entrypoint": "python train.py",
        "searcher": {
            "name": "random",
            "metric": "eval_loss",
            "max_trials": 2,
            "max_length": {"batches": 10},
        },
        "hyperparameters": {"training_arguments": arguments},
        **more,
    }
    try:
        check_experiment(content, MemoryFiles({"train.py": script.encode()}))
    except ConfigError as error:
        return error.problems
    return []


def test_unknown_training_arguments_have_suggestions() -> None:
    rate = {"type": "log", "base": 10, "minval": -5, "maxval": -3}
    reported = problems({"learning_rat": rate, "seed": 1, "no_such_thing_at_all": 1})
    key = "hyperparameters.training_arguments"
    assert reported == [
        f"{key}.learning_rat: TrainingArguments has no such argument; "
        "did you mean 'learning_rate'?",
        f"{key}.no_such_thing_at_all: TrainingArguments has no such argument",
    ]


@pytest.mark.parametrize(
    "script",
    [
        "import transformers\nclass Mine(transformers.TrainingArguments):\n    more: int = 1\n",
        "from transformers import Seq2SeqTrainingArguments\n",
        "from transformers import TrainingArguments\nfrom trl import SFTConfig\n",
        "from ours import arguments\n",
        "no python",
    ],
)
def test_scripts_with_other_arguments_are_accepted(script: str) -> None:
    assert problems({"more": 1}, script) == []


def test_names_match_training_arguments() -> None:
    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    assert names <= _installed_names()
    assert "learning_rate" in names
