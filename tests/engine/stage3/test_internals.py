"""Private torch names of stage 3: all exist, and only one file uses them."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrial
from zerotrial.engine.stage3 import internals

ENGINE = Path(internals.__file__).parents[1]
OURS = {"_gather_by", "_member", "_owner", "_remove_hooks"}
OF_MODULES = {
    "torch.distributed._composable_state": {"_module_state_mapping"},
    "torch.distributed._composable.contract": {"STATE_KEY", "REGISTRY_KEY"},
    "torch.distributed.tensor._dtensor_spec": {"DTensorSpec"},
}
OF_STATES = {
    "_fsdp_param_group",
    "_lazy_init",
    "_post_forward",
    "_post_forward_hook_handle",
    "_pre_forward",
    "_pre_forward_hook_handle",
    "_training_state",
}
OF_GROUPS = {
    "_all_gather_result",
    "_module_to_pre_load_state_dict_hook_handle",
    "_module_to_pre_save_state_dict_hook_handle",
    "_to_sharded",
    "_to_unsharded",
    "_training_state",
    "finalize_backward",
    "fsdp_params",
    "is_unsharded",
    "modules",
    "post_backward",
    "reshard",
    "unshard",
    "unshard_in_backward",
    "wait_for_unshard",
}
OF_PARAMETERS = {
    "_module_info",  # read by _setattr_on_modules
    "_post_load_hook_handle",
    "_setattr_on_modules",
    "_sharded_param_data",
    "_unsharded_param",
    "all_gather_outputs",
    "alloc_all_gather_outputs",
    "free_unsharded_param",
    "init_all_gather_outputs",
    "init_unsharded_param",
    "orig_dtype",
    "param_dtype",
    "reset_sharded_param",
    "sharded_param",
    "unsharded_accumulated_grad",
    "unsharded_param",
}
OF_TENSORS = {"_local_tensor", "_spec"}
OF_BINDINGS = {"_swap_tensor_impl"}
OF_TORCH = {"_C", "_chunk_cat", "_foreach_copy_"}
OF_AUTOGRAD = {"_unsafe_preserve_version_counter"}


class _Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.fixture(scope="module")
def model() -> Any:
    module = _Unit()
    engine, *_ = zerotrial.initialize(
        model=module,
        config={
            "train_batch_size": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3},
        },
    )
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    yield module
    engine.close()


def test_torch_has_every_name_used_by_stage_3(model: nn.Module) -> None:
    assert not [name for name in OF_TORCH if not hasattr(torch, name)]
    assert not [name for name in OF_AUTOGRAD if not hasattr(torch.autograd, name)]
    for name, attributes in OF_MODULES.items():
        module = __import__(name, fromlist=["*"])
        assert not [a for a in attributes if not hasattr(module, a)], name
    state = internals._state_of(model)
    owner = state._fsdp_param_group
    (member, _) = owner.fsdp_params
    for names, value in (
        (OF_STATES, state),
        (OF_GROUPS, owner),
        (OF_PARAMETERS, member),
        (OF_TENSORS, member.sharded_param),
        (OF_BINDINGS, torch._C),
    ):
        assert not [name for name in names if not hasattr(value, name)], type(value).__name__


def private_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_")
    }


def test_table_of_names_is_complete() -> None:
    pinned = OF_STATES | OF_GROUPS | OF_PARAMETERS | OF_TENSORS | OF_TORCH | OF_MODULES.keys()
    pinned |= OF_BINDINGS | OF_AUTOGRAD | {name for names in OF_MODULES.values() for name in names}
    used = private_names(Path(internals.__file__))
    used = {name for name in used if not name.startswith("__")}
    assert used - OURS <= pinned


def test_no_other_file_uses_them() -> None:
    names = {n for n in OF_STATES | OF_GROUPS | OF_PARAMETERS | OF_TENSORS if n.startswith("_")}
    for path in ENGINE.rglob("*.py"):
        if path == Path(internals.__file__):
            continue
        if path.parent.name == "stage3":
            assert not private_names(path) & names, path
        imported = {
            node.module or ""
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom)
        }
        assert not {m for m in imported if "._fully_shard" in m or "._composable" in m}, path
