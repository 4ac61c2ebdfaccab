"""The documentation of DeepSpeed's public names matches the replacement."""

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.ranks import run_on_ranks
from zerolab.errors import EngineError
from zerotrial.extensions.deepspeed_api import finder, install
from zerotrial.extensions.deepspeed_api.unsupported import MissingName

PAGE = Path(__file__).parents[3] / "docs" / "migrate" / "from_deepspeed.md"
NAMES: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / "deepspeed_names.json").read_text()
)
"""Of DeepSpeed 0.19.8, by module: classes, functions and constants that are its own."""

ENGINES = ("DeepSpeedEngine", "PipelineEngine")


def rows() -> dict[str, list[tuple[list[str], str]]]:
    """Return the names and the text of each row, by module."""
    actual: dict[str, list[tuple[list[str], str]]] = {}
    module = ""
    for line in PAGE.read_text().partition("## Every public name")[2].splitlines():
        if line.startswith("### "):
            module = line.split("`")[1]
        elif line.startswith("| `"):
            name, _, right = line.strip("| ").partition(" | ")
            actual.setdefault(module, []).append((re.findall(r"`([^`]+)`", name), right))
    return actual


def test_every_public_name_is_in_one_row() -> None:
    reported = {m: [name for names, _ in of for name in names] for m, of in rows().items()}
    assert {m: sorted(names) for m, names in reported.items()} == {
        m: sorted(names) for m, names in NAMES.items()
    }


def look_up(_: str) -> dict[str, list[str]]:
    install()
    import deepspeed

    def has(module: str, name: str) -> bool:
        if module in ENGINES:
            return hasattr(getattr(deepspeed, module), name)
        value = getattr(importlib.import_module(module), name)
        if isinstance(value, ModuleType):
            return value.__name__ in finder._MODULES
        return not isinstance(value, MissingName)

    return {m: [name for name in names if has(m, name)] for m, names in NAMES.items()}


def test_supported_names_equal_existing_names() -> None:
    (actual,) = run_on_ranks(look_up, 1, "")
    existing = {
        module: sorted(
            name
            for names, result in of
            if result == "the same" or result.startswith("there: ")
            for name in names
        )
        for module, of in rows().items()
    }
    assert existing == {module: sorted(names) for module, names in actual.items()}


DEEPER = {
    "deepspeed.utils.groups": "ranks and groups are torch.distributed's",
    "deepspeed.HybridEngine": "call generate() within",
    "deepspeed.runtime.hybrid_engine.DeepSpeedHybridEngine": "call generate() within",
    "deepspeed.runtime.fp16.onebit.adam.OnebitAdam": "one-bit optimizers are DeepSpeed's alone",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF": "sequence_parallel_size",
    "deepspeed.ops.sparse_attention.SparseSelfAttention": "there is no sparse attention",
    "deepspeed.elasticity.compute_elastic_config": "set resources.elastic",
    "deepspeed.ops.adam.multi_tensor_apply": "internal to DeepSpeed",
    "deepspeed.runtime.activation_checkpointing.config": "use the activation_checkpointing block",
    "deepspeed.utils.tensor_fragment": "use the safe_*_full_* of deepspeed.utils",
    "deepspeed.runtime.dataloader.DeepSpeedDataLoader": "use what initialize returns",
}
"""Names that scripts of several years import, and the errors."""


def fail(_: str) -> dict[str, dict[str, str]]:
    """Return the error of the first use of each unsupported name, by module."""
    install()
    import deepspeed

    for name, instead in DEEPER.items():
        parent, _, last = name.rpartition(".")
        for code in (f"from {parent} import {last} as x", f"import {parent}; x = {name}"):
            with pytest.raises((EngineError, AttributeError), match=re.escape(instead)):
                exec(f"{code}\nx() if callable(x) else x.anything", {"deepspeed": deepspeed})
    with pytest.raises(AttributeError, match=r"nowhere: .* does not provide it$"):
        _ = importlib.import_module("deepspeed.comm").nowhere.to_be_found

    def error_message(module: str, name: str) -> str:
        try:
            if module in ENGINES:
                engine = object.__new__(getattr(deepspeed, module))
                vars(engine)["module"] = torch.nn.Linear(1, 1)
                getattr(engine, name)
            else:
                value = getattr(importlib.import_module(module), name)
                if isinstance(value, (MissingName, ModuleType)):
                    _ = value.anything.more
        except AttributeError as error:
            return str(error)
        return ""

    return {
        m: {name: reported for name in names if (reported := error_message(m, name))}
        for m, names in NAMES.items()
    }


def test_unsupported_names_raise_the_documented_remedy() -> None:
    (actual,) = run_on_ranks(fail, 1, "")
    checked = 0
    for module, of in rows().items():
        for names, result in of:
            if not result.startswith("none: "):
                continue
            instead = result.removeprefix("none: ").replace("`", "")
            for name in names:
                assert actual[module][name].endswith(instead), f"{module}.{name}"
                checked += 1
    assert checked > 400


SCRIPT = """
from __future__ import annotations
import deepspeed.moe.layer
import deepspeed.somewhere.new as new
from deepspeed.checkpointing import (
    CudaRNGStatesTracker, get_cuda_rng_tracker, model_parallel_cuda_manual_seed
)
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import LAMB_OPTIMIZER
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepspeed.runtime.pipe.schedule import PipeSchedule, TrainSchedule
from deepspeed.utils import groups
from torch import nn

class OwnSchedule(PipeSchedule):
    pass

class Own(nn.Module, deepspeed.moe.layer.MoE):
    pass

def train(optimizer: BF16_Optimizer | None = None, other: "None | OwnSchedule" = None) -> None:
    return isinstance(optimizer, (BF16_Optimizer, OwnSchedule))
"""


def use(_: str) -> dict[str, str]:
    install()
    names: dict[str, Any] = {}
    exec(SCRIPT, names)
    assert names["train"]() is False
    assert (names["groups"].__module__, names["groups"].__name__) == ("deepspeed.utils", "groups")
    assert not issubclass(nn.Linear, names["BF16_Optimizer"])
    actual = {}
    for code in (
        "BF16_Optimizer(1)",
        "OwnSchedule(2)",
        "Own()",
        "deepspeed.moe.layer.MoE(hidden_size=1)",
        "new.Thing()",
        "new.thing.part",
        "groups.get_data_parallel_group()",
        "CurriculumScheduler({})",
        "'LAMB' == LAMB_OPTIMIZER",
        "LAMB_OPTIMIZER in ['LAMB']",
        "str(LAMB_OPTIMIZER)",
        "f'{LAMB_OPTIMIZER}'",
        "[*LAMB_OPTIMIZER]",
        "get_cuda_rng_tracker().fork()",
        "CudaRNGStatesTracker()",
        "model_parallel_cuda_manual_seed(1)",
    ):
        with pytest.raises((EngineError, AttributeError)) as error:
            exec(code, names)
        actual[code] = str(error.value)
    return actual


def test_missing_names_import_and_fail_when_used() -> None:
    (actual,) = run_on_ranks(use, 1, "")
    assert all("Zerolab replaces deepspeed" in message for message in actual.values())
    assert "or stage 3" in actual["Own()"]
    for code in actual:
        if "get_cuda_rng" in code or "CudaRNG" in code or "manual_seed" in code:
            assert "named random states are not supported" in actual[code]
    assert "or stage 3" in actual["deepspeed.moe.layer.MoE(hidden_size=1)"]
    assert actual["OwnSchedule(2)"].startswith("deepspeed.runtime.pipe.schedule.PipeSchedule: ")
    assert actual["new.Thing()"].startswith("deepspeed.somewhere.new.Thing: ")


def call_launcher_names(directory: str) -> Any:
    install()
    from deepspeed.compression.helper import recursive_getattr, recursive_setattr
    from deepspeed.launcher.runner import fetch_hostfile, parse_inclusion_exclusion
    from deepspeed.runtime.utils import move_to_device

    file = Path(directory) / "hosts"
    file.write_text("one slots=2\ntwo slots=2\n")
    hosts = fetch_hostfile(str(file))
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    recursive_setattr(model, "0.bias", None)
    recursive_setattr(model, "1", nn.Tanh())
    item = torch.ones(1)
    moved = move_to_device({"a": [item], "b": (item,)}, "meta", lambda x: isinstance(x, float))
    return (
        fetch_hostfile(directory + "/nowhere"),
        parse_inclusion_exclusion(hosts, "two:1", ""),
        parse_inclusion_exclusion(hosts, "", "one"),
        recursive_getattr(model, "0.bias"),
        type(recursive_getattr(model, "1")).__name__,
        moved["a"][0].device.type + moved["b"][0].device.type,
    )


def test_launcher_and_helper_names_work(tmp_path: Path) -> None:
    (actual,) = run_on_ranks(call_launcher_names, 1, str(tmp_path))
    assert actual == (None, {"two": [1]}, {"two": [0, 1]}, None, "Tanh", "metameta")


def test_methods_are_documented_as_methods() -> None:
    from zerotrial.extensions.deepspeed_api.engine import DeepSpeedEngine

    same = [
        name
        for names, result in rows()["DeepSpeedEngine"]
        if result == "the same"
        for name in names
    ]
    assert len(same) > 40
    assert [name for name in same if not callable(getattr(DeepSpeedEngine, name))] == []


def resolve(dotted: str) -> Any:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise AssertionError(f"{dotted}: there is no such name")


def test_documented_replacements_exist() -> None:
    results = " ".join(result for of in rows().values() for _, result in of)
    replacements = set(re.findall(r"`(zero(?:lab|trial)[\w.]+)`", results))
    assert {"zerotrial.initialize", "zerolab.errors.ConfigError"} <= replacements
    for dotted in sorted(replacements):
        assert resolve(dotted) is not None
    from zerotrial.extensions.deepspeed_api.pipeline import PipelineEngine

    methods = set(re.findall(r"`engine\.(\w+)", results)) - {"config"}
    assert {"full", "set_full"} <= methods
    attributes = {name for kind in PipelineEngine.__mro__ for name in vars(kind)}
    annotated = {
        name for kind in PipelineEngine.__mro__ for name in vars(kind).get("__annotations__", ())
    }
    assert methods - attributes - annotated == set()
