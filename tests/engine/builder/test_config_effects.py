"""Configuration keys that affect traffic or memory, but not the training result."""

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.engine.ranks import run_on_ranks
from tests.engine.stage3.test_stage3 import Branching, Mixture, Normed, train, two_engines
from tests.engine.stage3_models import Language, make_batches
from zerotrial.engine import Engine, initialize
from zerotrial.engine.comm.communicator import GroupCommunicator, Work
from zerotrial.engine.comm.factory import connect

CPU = torch.device("cpu")
BLOCKS, WIDTH = 4, 32
PADDING = WIDTH
"""Elements that make the table of 13 rows divisible by two ranks; they move, but are not held."""


def build() -> Language:
    torch.manual_seed(3)
    return Language(width=WIDTH, blocks=BLOCKS)


def sizes() -> tuple[int, int]:
    """Return the elements outside of blocks and those of one block."""
    model = build()
    block = sum(p.numel() for p in model.blocks[0].parameters())
    return sum(p.numel() for p in model.parameters()) - BLOCKS * block, block


def make_engine(model: nn.Module, zero: dict[str, Any], micro: int = 1, **more: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "zero_optimization": {"stage": 3, **zero},
        **more,
    }
    return initialize(model=model, config=config)[0]


class Run:
    """Short training and the traffic of its last step."""

    def __init__(self, zero: dict[str, Any], micro: int = 1, **more: Any) -> None:
        ranks = dist.get_world_size()
        engine = make_engine(build(), zero, micro, **more)
        self.course: list[float] = []
        for step in make_batches(2, micro, ranks):
            engine.stage._comm.traffic.clear()
            for batch in step:
                loss = engine(*batch[dist.get_rank()])
                self.whole = full_elements(engine.module)
                self.course.append(loss.item())
                engine.backward(loss)
                engine.step()
            self.course.append(engine.get_global_grad_norm() or 0.0)
            self.whole_at_rest = full_elements(engine.module)
            self.moved = dict(engine.stage._comm.traffic.elements)
        engine.close()


def full_elements(module: nn.Module) -> int:
    """Return the elements of the parameters that are full on this rank."""
    return sum(p.numel() for p in module.parameters() if not isinstance(p, DTensor))


def check_persistence() -> Iterator[tuple[str, Any, Any]]:
    root, block = sizes()
    total = root + PADDING + BLOCKS * block
    plain = Run({})
    yield "blocks are gathered twice", plain.moved["all_gather"], total + BLOCKS * block
    yield "the root alone stays whole", plain.whole, root
    for zero, remaining in (
        ({"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}, BLOCKS),
        ({"stage3_max_live_parameters": 1e9}, BLOCKS),
        ({"stage3_max_live_parameters": root + 2 * block}, 2),
        ({"stage3_max_live_parameters": root + 2 * block - 1}, 1),
        ({"stage3_max_live_parameters": 0}, 0),
        ({"stage3_max_reuse_distance": 4 * block}, 3),
        ({"stage3_max_reuse_distance": 4 * block - 1}, 2),
        ({"stage3_max_reuse_distance": 0}, 1),
    ):
        run = Run(zero)
        gathered = total + (BLOCKS - remaining) * block
        moved = {"all_gather": gathered, "reduce_scatter": total}
        yield f"{zero}: traffic", run.moved, moved
        yield f"{zero}: whole between forward and backward", run.whole, root + remaining * block
        yield f"{zero}: whole at rest", run.whole_at_rest, 0
        yield f"{zero}: losses and norms", run.course, plain.course


def check_replication() -> Iterator[tuple[str, Any, Any]]:
    """Yield checks that small parameters stay replicated and are gathered once a step."""
    root, block = sizes()
    plain = Run({}, 2)
    once = root + PADDING + 2 * BLOCKS * block
    yield "each micro-batch gathers", plain.moved["all_gather"], 2 * once
    largest = 4 * WIDTH * WIDTH
    threshold, most = "stage3_param_persistence_threshold", "stage3_model_persistence_threshold"
    small = {name: p.numel() for name, p in build().named_parameters() if p.numel() < largest}
    everything = root + BLOCKS * block
    for zero, replicated in (
        ({threshold: largest + 1}, everything),
        ({threshold: largest}, sum(small.values())),
        ({threshold: 1}, 0),
        ({threshold: 0}, 0),
        ({threshold: largest + 1, most: everything}, everything),
        ({threshold: 1000, most: 0}, 0),
    ):
        run = Run(zero, 2)
        yield f"{zero}: whole at rest", run.whole_at_rest, replicated
        yield f"{zero}: whole in forward", run.whole >= max(replicated, root), True
        near = run.course == pytest.approx(plain.course, rel=1e-5)
        yield f"{zero}: losses and norms", near, True
        if replicated == everything:
            yield f"{zero}: traffic", run.moved["all_gather"], everything


def gathered_so_far(zero: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    """Blocks gathered when each block runs forward and backward, in the order of use; losses."""
    root, block = sizes()
    model = build()
    forward: list[int] = []
    backward: list[int] = []

    def count() -> int:
        moved: int = engine.stage._comm.traffic.elements["all_gather"]
        return (moved - root - PADDING) // block

    def watch(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        forward.append(count())
        inputs[0].register_hook(lambda _: backward.append(count() - BLOCKS))  # type: ignore[no-untyped-call]

    for child in model.blocks:
        child.register_forward_pre_hook(watch)
    engine = make_engine(model, zero)
    losses = []
    for step in make_batches(2, 1, dist.get_world_size()):
        forward.clear()
        backward.clear()
        engine.stage._comm.traffic.clear()
        loss = engine(*step[0][dist.get_rank()])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return forward, backward, losses


def check_fetches() -> Iterator[tuple[str, Any, Any]]:
    _, block = sizes()
    *_, losses = gathered_so_far({})
    for numel, forward, backward in (
        (None, [1, 2, 3, 4], [2, 3, 4, 4]),
        (0, [1, 2, 3, 4], [1, 2, 3, 4]),
        (1, [2, 3, 4, 4], [2, 3, 4, 4]),
        (2 * block - 1, [2, 3, 4, 4], [2, 3, 4, 4]),
        (2 * block, [3, 4, 4, 4], [3, 4, 4, 4]),
        (1e9, [4, 4, 4, 4], [4, 4, 4, 4]),
    ):
        zero = {} if numel is None else {"stage3_prefetch_bucket_size": numel}
        gathered = gathered_so_far(zero)
        yield f"prefetch {numel}", gathered, (forward, backward, losses)


def together() -> Iterator[tuple[str, Any, Any]]:
    _, block = sizes()
    zero = {
        "stage3_max_live_parameters": 3 * block,
        "stage3_prefetch_bucket_size": 2 * block,
        "stage3_param_persistence_threshold": 1000,
    }
    for more in (
        {"bf16": {"enabled": True}},
        {"activation_checkpointing": {"enabled": True}},
    ):
        usual, other = (Run(keys, 2, **more).course for keys in ({}, zero))
        near = other == pytest.approx(usual, rel=1e-2 if "bf16" in more else 1e-5)
        yield f"all keys, {more}: {usual} {other}", near, True


def odd_models() -> Iterator[tuple[str, Any, Any]]:
    """Units inside units, units that some ranks never run, batch norms in fp32, two engines."""
    batches = make_batches(3, 2, dist.get_world_size())
    zero = {
        "stage": 3,
        "stage3_max_live_parameters": 1e9,
        "stage3_prefetch_bucket_size": 1e9,
        "stage3_param_persistence_threshold": 30,
    }
    for make, more in (
        (Branching, {}),
        (Mixture, {}),
        (Normed, {"bf16": {"enabled": True}}),
    ):
        usual = train(make, batches, more)
        other = train(make, batches, {**more, "zero_optimization": zero})
        bound = 1e-2 if "bf16" in more else 1e-5
        near = other.losses == pytest.approx(usual.losses, rel=bound)
        near &= other.norms == pytest.approx(usual.norms, rel=bound)
        yield f"{make.__name__}: losses and norms", near, True
        gaps = [float((other.weights[n] - w).abs().max()) for n, w in usual.weights.items()]
        yield f"{make.__name__}: weights, {max(gaps)}", max(gaps) < bound, True
    for name, problems in two_engines(zero):
        yield name, problems, []


def check_weight_swap() -> Iterator[tuple[str, Any, Any]]:
    """Weights that are swapped after an evaluation, as with an average of them."""
    ((batch, *_),), *_ = make_batches(1, 1, 1)
    engine = make_engine(build(), {"stage3_max_live_parameters": 1e9})
    fresh = build()
    near = []
    with torch.no_grad():
        for _ in range(2):
            near.append(abs(engine(*batch).item() - fresh(*batch).item()) < 1e-5)
            for parameter in (*engine.module.parameters(), *fresh.parameters()):
                parameter.mul_(0.5)
        weights = dict(engine.stage.full_weights())
    expected = dict(fresh.named_parameters())
    near += [torch.equal(weight, expected[name]) for name, weight in weights.items()]
    engine.close()
    yield "evaluations see new weights, which last", set(near), {True}


def check_all_reduce() -> Iterator[tuple[str, Any, Any]]:
    """Several small buckets in flight, in one and two micro-batches, at stages 1 and 2."""
    for stage, micro in ((1, 1), (1, 2), (2, 1), (2, 2)):
        zero = {"stage": stage, "reduce_bucket_size": 5000, "allgather_bucket_size": 5000}
        usual, other = Run(zero, micro), Run({**zero, "reduce_scatter": False}, micro)
        name = f"stage {stage}, {micro} micro-batches"
        moved = {**usual.moved, "all_reduce": 2 * usual.moved["reduce_scatter"]}
        del moved["reduce_scatter"]
        yield f"{name}: traffic", other.moved, moved
        yield f"{name}: losses and norms", other.course, usual.course
        bf16 = {"bf16": {"enabled": True}}
        usual, other = (Run({**zero, **z}, micro, **bf16) for z in ({}, {"reduce_scatter": False}))
        far = max(abs(a - b) / b for a, b in zip(other.course, usual.course, strict=True))
        yield f"{name}: bf16, {far}", far < 0.01, True


def reusing_buffers() -> Iterator[tuple[str, Any, Any]]:
    """A buffer that is filled again at once, on every kind of communicator."""
    from zerotrial.extensions.all_reduce import without_reduce_scatter

    group = dist.group.WORLD
    assert group is not None
    shard, rounds = 50_000, 20
    for comm in (connect(group, CPU), GroupCommunicator(group, CPU)):
        instead = without_reduce_scatter(comm)
        buffers = [instead.allocate(shard * comm.size, torch.float32, CPU) for _ in range(2)]
        works: list[Work | None] = [None, None]
        out = torch.zeros(shard)
        for number in range(rounds):
            turn = number % 2
            if (work := works[turn]) is not None:
                work.wait()
                work.release()
            buffers[turn].tensor.fill_(comm.rank + number)
            works[turn] = instead.reduce_scatter(buffers[turn], out, 0.5, add=True)
        for work in works:
            assert work is not None
            work.wait()
        ranks = range(comm.size)
        total = sum((rank + number) * 0.5 for rank in ranks for number in range(rounds))
        yield f"{type(comm).__name__}: sums", set(out.tolist()), {total}
        comm.fence()
        comm.close()


def updating_in_tiles() -> Iterator[tuple[str, Any, Any]]:
    """A checkpoint with tiles loads without them, and the other way round."""
    tile = 1000
    tiles = {"sub_group_size": tile}
    plain = Run({})
    ranks, rank = dist.get_world_size(), dist.get_rank()
    with shared_directory() as directory:
        offload = {"offload_optimizer": {"device": "nvme", "nvme_path": directory}}
        for zero in ({}, offload):
            yield f"tiles, {list(zero)}", Run({**zero, **tiles}).course, plain.course
        for name, first, second in (("cut", tiles, {}), ("uncut", {}, tiles)):
            engine = make_engine(build(), first)
            lengths = [piece.stop - piece.start for piece in engine.stage.pieces()]
            yield f"{name}: pieces", max(lengths) <= tile, bool(first)
            for step in make_batches(2, 1, ranks):
                engine.backward(engine(*step[0][rank]))
                engine.step()
            engine.save_checkpoint(directory, name)
            other = make_engine(build(), {**second, **offload})
            other.load_checkpoint(directory, name)
            ends = []
            for closing in (engine, other):
                closing.backward(closing(*step[0][rank]))
                closing.step()
                ends.append(closing(*step[0][rank]).item())
            yield f"{name}: continues as the other", ends[0], ends[1]
            nbytes = sum(t.nbytes for t in other.stage.tensors_by_kind()["optimizer"])
            # Three tiles or blocks, with two states each, and memory to be used again.
            few = 4 * 3 * 4 * tile
            yield f"{name}: {nbytes} bytes held", nbytes <= few, bool(second)
            engine.close()
            other.close()


@contextmanager
def shared_directory() -> Iterator[str]:
    """Yield a directory that is common to all ranks."""
    with TemporaryDirectory() as directory:
        names = [directory]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()


def wrong(*cases: Any) -> list[str]:
    return [
        f"{name}: {actual} instead of {expected}"
        for case in cases
        for name, actual, expected in case()
        if actual != expected
    ]


def on_ranks() -> list[str]:
    return wrong(
        check_persistence,
        check_replication,
        check_fetches,
        together,
        odd_models,
        check_weight_swap,
        check_all_reduce,
        reusing_buffers,
        updating_in_tiles,
    )


@pytest.mark.processes
def test_traffic_and_memory_keys_have_only_their_effect() -> None:
    assert run_on_ranks(on_ranks, 2) == [[], []]


def test_weights_written_after_evaluation_last() -> None:
    assert wrong(check_weight_swap) == []
