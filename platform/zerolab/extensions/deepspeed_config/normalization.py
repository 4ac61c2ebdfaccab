"""Normalization of public engine files before the strict reader.

DeepSpeed reads its files with hjson, ignores unknown keys, and has old names for some keys.
Hugging Face's libraries write further keys. This module converts such a file to the form that
the strict reader expects, with one line for each change.
"""

import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from zerolab.config.engine.dialect import check_json_values
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.schema.section import Section, dotted, keys_of, section_of

__all__ = ["drop_idle", "normalize"]

Block = dict[str, Any]
Step = Callable[[Block], Iterator[str]]
"""A function that changes a file in place and yields a line for each change."""


def normalize(content: Mapping[str, Any], source: str) -> tuple[Block, list[str]]:
    """Convert a file's content to the form that the strict reader expects.

    Args:
        content: A file; it is not changed.
        source: Its name, for messages.

    Returns:
        The content, and one line for each change.

    Raises:
        ConfigError: If it has values that no file may have.
    """
    data = dict(content)
    changes = list(_drop_infinite_steps(data))
    check_json_values(data, source)
    data = _copy_block(data)
    return data, changes + [line for step in _STEPS for line in step(data)]


def drop_idle(content: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Drop ``offload_param`` if parameters are not sharded, as DeepSpeed does.

    Args:
        content: A file, with its overrides and without ``"auto"``.

    Returns:
        The content, and one line if something was dropped.
    """
    zero = content.get("zero_optimization")
    if not isinstance(zero, Mapping) or not isinstance(zero.get("offload_param"), Mapping):
        return content, []
    stage, device = zero.get("stage", 0), zero["offload_param"].get("device", "none")
    if stage not in (0, 1, 2) or device not in ("cpu", "nvme"):
        return content, []
    remaining = {key: value for key, value in zero.items() if key != "offload_param"}
    line = (
        f"zero_optimization.offload_param: device {device!r} is left out; it has an effect at "
        f"stage 3 only, and the stage is {stage}"
    )
    return {**content, "zero_optimization": remaining}, [line]


def _copy_block(block: Mapping[str, Any]) -> Block:
    return {
        key: _copy_block(value) if isinstance(value, Mapping) else value
        for key, value in block.items()
    }


def _block_at(data: Block, *path: str) -> Block:
    """Return the block at a path; a new empty one if it is missing."""
    for key in path:
        block = data.get(key)
        data = block if isinstance(block, dict) else {}
    return data


_COMMENT = re.compile(r"_.*|//.*|#.*|comments?")


def _drop_comments(data: Block, prefix: str = "") -> Iterator[str]:
    for key, value in list(data.items()):
        if isinstance(value, dict):
            yield from _drop_comments(value, f"{prefix}{key}.")
        lines = value if isinstance(value, list) else [value]
        if (
            isinstance(key, str)
            and _COMMENT.fullmatch(key)
            and all(isinstance(word, str) for word in lines)
        ):
            del data[key]
            yield f"{prefix}{key}: is a comment, and left out"


def _fold_dotted(data: Block) -> Iterator[str]:
    first_keys = (*keys_of(EngineConfig), "bfloat16")
    for key in [key for key in data if "." in str(key)]:
        *blocks, last = key.split(".")
        if blocks[0] not in first_keys or not all((*blocks, last)) or not _has_room(data, blocks):
            continue
        home = data
        for part in blocks:
            home[part] = home = home.get(part) or {}
        instead = f", instead of {home[last]!r}" if home.get(last) not in (None, data[key]) else ""
        home[last] = data.pop(key)
        yield f"{key}: a dotted key; read as {last!r} inside {dotted(blocks)!r}{instead}"


def _has_room(data: Block, path: list[str]) -> bool:
    """Return whether only blocks, or nothing, are along a path."""
    block: Any = data
    for part in path:
        block = block.get(part)
        if not isinstance(block, dict):
            return block is None
    return True


_INFINITE = re.compile(r"\+?inf(inity)?", re.IGNORECASE)


def _drop_infinite_steps(data: Block) -> Iterator[str]:
    value = data.get("steps_per_print")
    endless = isinstance(value, float) and math.isinf(value)
    if endless or (isinstance(value, str) and _INFINITE.fullmatch(value)):
        del data["steps_per_print"]
        yield f"steps_per_print: {value} means never; left out, and no line of progress is printed"


def _rename_bfloat16(data: Block) -> Iterator[str]:
    if "bfloat16" in data and "bf16" not in data:
        data["bf16"] = data.pop("bfloat16")
        yield "bfloat16: an old name of bf16; read as bf16"


_SWITCHES = {"true": True, "false": False}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_ARGUMENTS = (("optimizer", "params"), ("scheduler", "params"))
"""Blocks without a section, in which no text looks like a number."""


def _read_numbers(data: Block) -> Iterator[str]:
    yield from _numbers_of(data, EngineConfig, ())
    for path in _ARGUMENTS:
        yield from _numbers_in(_block_at(data, *path), path)


def _numbers_of(block: Block, section: type[Section], path: tuple[str, ...]) -> Iterator[str]:
    """Convert texts to numbers and switches for keys that take no text."""
    for name, field in section.model_fields.items():
        key = field.alias or name
        value, inner = block.get(key), section_of(field.annotation)
        if isinstance(value, dict) and inner is not None:
            yield from _numbers_of(value, inner, (*path, key))
        elif isinstance(value, str) and _takes_numbers(field.annotation):
            yield from _numbers_in(block, path, [key])
        elif isinstance(value, str) and field.annotation is bool and value.lower() in _SWITCHES:
            block[key] = _SWITCHES[value.lower()]
            yield f"{dotted((*path, key))}: the text {value!r} is read as {value.lower()}"


def _takes_numbers(annotation: Any) -> bool:
    parts = list(typing.get_args(annotation))
    if typing.get_origin(annotation) is Annotated:
        return _takes_numbers(parts[0])
    if typing.get_origin(annotation) is Literal:
        return all(type(part) is int for part in parts)
    if not parts:
        return annotation in (int, float)
    return all(part is types.NoneType or _takes_numbers(part) for part in parts)


def _numbers_in(
    block: Block, path: tuple[str, ...], keys: Collection[str] | None = None
) -> Iterator[str]:
    for key in list(block) if keys is None else keys:
        value = block[key]
        read = [_number(item) for item in value] if isinstance(value, list) else _number(value)
        if read != value:
            block[key] = read
            yield f"{dotted((*path, key))}: the text {value!r} is read as {read}"


def _number(value: Any) -> Any:
    if not isinstance(value, str) or not _NUMBER.fullmatch(value.strip()):
        return value
    read = float(value)
    if not math.isfinite(read):
        return value
    return int(value) if value.strip().lstrip("+-").isdigit() else read


def _read_zero_switch(data: Block) -> Iterator[str]:
    value = data.get("zero_optimization")
    if isinstance(value, bool):
        data["zero_optimization"] = {"stage": int(value)}
        yield f"zero_optimization: {value} is read as stage {int(value)}, as in DeepSpeed"


def _drop_empty_sub_groups(data: Block) -> Iterator[str]:
    zero = _block_at(data, "zero_optimization")
    size = zero.get("sub_group_size")
    if type(size) in (int, float) and size == 0:
        del zero["sub_group_size"]
        yield "zero_optimization.sub_group_size: 0 is no size; left out, and the engine chooses it"


_BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size")


def _round_buckets(data: Block) -> Iterator[str]:
    zero = _block_at(data, "zero_optimization")
    for key in _BUCKETS:
        size = zero.get(key)
        if type(size) is float and size >= 1 and not size.is_integer():
            zero[key] = int(size)
            yield f"zero_optimization.{key}: {size} elements are read as {zero[key]}"


def _read_compile_disable(data: Block) -> Iterator[str]:
    block = _block_at(data, "compile")
    disable = block.get("disable")
    if not isinstance(disable, bool):
        return
    del block["disable"]
    if disable:
        block["enabled"] = False
        yield "compile.disable: true is read as compile.enabled: false"
    else:
        yield (
            "compile.disable: false turns nothing on, in DeepSpeed neither; left out "
            "(compile.enabled: true compiles the model)"
        )


_OFFLOADS = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}


def _read_cpu_offload(data: Block) -> Iterator[str]:
    zero = _block_at(data, "zero_optimization")
    for old, new in _OFFLOADS.items():
        if zero.get(old) is True and zero.get(new) is None:
            del zero[old]
            zero[new] = {"device": "cpu"}
            key, new_key = f"zero_optimization.{old}", f"zero_optimization.{new}"
            yield f'{key}: an old name; read as {new_key}: {{"device": "cpu"}}'
    pinned = "cpu_offload_use_pin_memory"
    if zero.get(pinned) is True:
        del zero[pinned]
        yield f"zero_optimization.{pinned}: true is the default of pin_memory; left out"


def _read_auto_tp(data: Block) -> Iterator[str]:
    block = _block_at(data, "tensor_parallel")
    sizes = {"autotp_size": block, "tp.tp_size": _block_at(block, "tp")}
    for old, home in sizes.items():
        size = home.get(old.rpartition(".")[2])
        is_requested = size not in (None, 0, 1, "auto") and not isinstance(size, Mapping)
        if is_requested and block.get("size") in (None, size):
            block["size"] = size
            del home[old.rpartition(".")[2]]
            yield f"tensor_parallel.{old}: DeepSpeed's name; read as tensor_parallel.size: {size}"
    if block.get("enabled") is True and block.get("size") is not None:
        del block["enabled"]
        yield "tensor_parallel.enabled: true is what tensor_parallel.size says; left out"
    if type(replicas := data.get("data_parallel_size")) is int:
        del data["data_parallel_size"]
        yield (
            f"data_parallel_size: {replicas} is left out; it follows from the number of ranks and "
            "tensor_parallel.size"
        )


_TYPES = {
    name: short
    for short, names in {
        "fp32": ("float32", "float"),
        "fp16": ("float16", "half"),
        "bf16": ("bfloat16",),
    }.items()
    for name in (short, *names)
}
_MEANS = {"sum": "sum", "mean": "mean", "avg": "mean", "average": "mean"}
_SPELLINGS: dict[tuple[str, ...], dict[str, str]] = {
    ("gradient_allreduce_op",): _MEANS,
    ("communication_data_type",): _TYPES,
    ("data_types", "grad_accum_dtype"): _TYPES,
    ("data_types", "param_dtype"): _TYPES,
}
"""Alternative spellings of values."""


def _canonical_spelling(data: Block) -> Iterator[str]:
    for (*path, name), spellings in _SPELLINGS.items():
        block = _block_at(data, *path)
        value = block.get(name)
        if isinstance(value, str):
            canonical = spellings.get(value.lower().removeprefix("torch."), value)
            if canonical != value:
                block[name] = canonical
                yield f"{dotted((*path, name))}: {value!r} is read as {canonical!r}"


def _drop_disable_allgather(data: Block) -> Iterator[str]:
    if data.get("disable_allgather") is True:
        del data["disable_allgather"]
        yield "disable_allgather: left out; updated weights must reach every rank, and always do"


def _enabled_anywhere(value: Any) -> bool:
    return isinstance(value, dict) and (
        value.get("enabled", False) is not False or any(map(_enabled_anywhere, value.values()))
    )


def _drop_unread_blocks(data: Block) -> Iterator[str]:
    for key, instead in (
        ("comms_config", "comms_logger"),
        ("monitor_config", "tensorboard or csv_monitor"),
    ):
        block = data.get(key)
        if isinstance(block, dict) and not _enabled_anywhere(block):
            del data[key]
            yield (
                f"{key}: turns nothing on, and DeepSpeed reads no such key; left out "
                f"(set {instead} at the top of the file)"
            )


_STEPS: tuple[Step, ...] = (
    _drop_comments,
    _read_zero_switch,
    _fold_dotted,
    _rename_bfloat16,
    _read_numbers,
    _drop_empty_sub_groups,
    _round_buckets,
    _read_compile_disable,
    _read_cpu_offload,
    _read_auto_tp,
    _canonical_spelling,
    _drop_disable_allgather,
    _drop_unread_blocks,
)
