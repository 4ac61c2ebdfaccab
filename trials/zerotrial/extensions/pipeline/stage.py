"""One chunk of the model under torch's schedules, with its gradients in a ZeRO stage.

torch.distributed.pipelining determines the order and moves activations. Gradients are handled by
this engine: each backward pass with gradients of weights begins and ends in the ZeRO stage. A
schedule that splits backward writes ``.grad`` without calling hooks, so gradients are collected
from there after each pass. After an exception chunks stop computing, and return zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_leaves, tree_map_only

from zerolab.errors import EngineError
from zerotrial.extensions.pipeline.split_backward import add_weight_gradients, keep_weight_gradients
from zerotrial.extensions.pipeline.transfer import Signature, rebuild

if TYPE_CHECKING:
    from zerotrial.engine.mesh import Axis
    from zerotrial.extensions.pipeline.single_stage import Passes

__all__ = ["FirstChunk", "Torch211Stage", "Torch212Stage", "ZeroStage", "stage_class"]


class FirstChunk(nn.Module):
    """First chunk with a lookup of its inputs, so that schedules pass only numbers."""

    def __init__(self, chunk: nn.Module) -> None:
        super().__init__()
        self.chunk = chunk
        self.inputs: Sequence[tuple[Any, ...]] = ()
        """Inputs of each micro-batch."""

    def forward(self, number: Tensor) -> Any:
        """Run the chunk on one of :attr:`inputs`."""
        return self.chunk(*self.inputs[int(number)])


class ZeroStage(PipelineStage):
    """Chunk with the interface of torch's schedules.

    Args:
        chunk: Module to run.
        position: Position among all chunks.
        total: Number of all chunks.
        pipe: Ranks of the pipeline.
        device: Device of this rank.
        received: Signature of the inputs; None for the first chunk.
        given: Signature of the outputs.
        ends: Description of the last layer, for errors.
        splits: Whether the schedule splits backward.
        recomputes: Whether backward recomputes activations.
    """

    def __init__(
        self,
        chunk: nn.Module,
        position: int,
        total: int,
        pipe: Axis,
        device: torch.device,
        *,
        received: Signature | None,
        outputs: Signature,
        ends: str,
        splits: bool,
        recomputes: bool,
    ) -> None:
        number = torch.zeros(1, dtype=torch.long)
        inputs = number if received is None else _examples(received, device)
        super().__init__(
            chunk,
            position,
            total,
            device,
            input_args=inputs,
            output_args=_examples(outputs, device),
            group=pipe.group,
        )
        self.passes: Passes | None = None
        """Backward passes of the current batch; set before each batch."""
        self._received = received
        self._given = outputs
        self._ends = ends
        self._splits = splits
        self._recomputes = recomputes

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch forward."""
        assert self.passes is not None
        with self.passes.observer.phase("forward"):
            if not self.passes.failures:
                with self.passes.failures.catching(fwd_chunk_id):
                    output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
                    self._check(output)
                    return output
            self.fwd_cache.clear()  # activations are no longer needed
            zeros = tuple(part.detach().zero_() for part in _examples(self._given, self.device))
            self.fwd_cache[fwd_chunk_id] = zeros, []
            return zeros

    def _check(self, output: Any) -> None:
        """Compare an output with the buffers of the next stage.

        Raises:
            EngineError: If it differs.
        """
        if self.is_last:
            return
        actual = Signature.of(output)
        if not self._given.fits(actual):
            raise EngineError(
                f"PipelineModule: {self._ends} must give the same shapes and types for all "
                f"inputs of one shape, since the next stage makes room for them once: planned was "
                f"{self._given}, got {actual}. Pass on what does not depend on values (a mask in "
                "place of indices, or padding), or cut at another layer (partition_method)"
            )

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chunk."""
        if self._received is not None:
            args = (rebuild(args, self._received.form),)
        output = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        if not self._splits:
            return output
        inner = _inner_nodes(tree_leaves(output))
        return tree_map_only(Tensor, lambda part: _copy_if_shared(part, inner), output)

    def backward_maybe_with_nosync(
        self,
        backward_type: str,
        bwd_kwargs: dict[str, Any],
        last_backward: bool = False,  # noqa: FBT001, FBT002 - torch's
    ) -> Any:
        """Run backward: ``full``, or a half, for the ``input`` or the ``weight`` gradients."""
        if backward_type == "weight":
            add_weight_gradients(bwd_kwargs["param_groups"], together=self._recomputes)
            return (), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends after a forward."""
        return _contiguous(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends after a backward."""
        return _contiguous(super().get_bwd_send_ops(bwd_chunk_id))

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,  # noqa: FBT001, FBT002 - torch's
        last_backward: bool = False,  # noqa: FBT001, FBT002 - torch's
    ) -> None:
        """Run one micro-batch backward; only for the inputs' gradients unless ``full``."""
        assert self.passes is not None
        gathering = self.passes.backward_pass(bwd_chunk_id) if full_backward else nullcontext()
        with self.passes.observer.phase("backward"), gathering:
            if not self.passes.failures:
                with self.passes.failures.catching(bwd_chunk_id):
                    unsplit = None if full_backward else self._unsplit_outputs(bwd_chunk_id, loss)
                    super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
                    if unsplit:
                        self._add_unsplit_gradients(unsplit, self.backward_state[bwd_chunk_id][-1])
                    return
            received = self._received.parts if self._received is not None else ()
            self.bwd_cache[bwd_chunk_id] = (None,) * len(received)  # sent as zeros

    def _unsplit_outputs(self, number: int, loss: Tensor | None) -> dict[int, GradientEdge]:
        """Return outputs that depend on weights but on no input, by index.

        Torch's split backward finds only weights on the path to an input. It does not split the
        first chunk, which has none.
        """
        outputs, inputs = self.fwd_cache[number]
        outputs_or_loss = (loss,) if self.is_last else outputs
        flowing = {id(value) for value in inputs if value.requires_grad}
        return {
            index: get_gradient_edge(output)
            for index, output in enumerate(outputs_or_loss if self.stage_index else ())
            if output.requires_grad and not _depends(output, flowing)
        }

    def _add_unsplit_gradients(
        self, edges_by_index: dict[int, GradientEdge], gradients: Sequence[Tensor | None] | None
    ) -> None:
        """Compute the gradients that the split omits."""
        weights = [weight for weight in self.submod.parameters() if weight.requires_grad]
        output_gradients = [
            None if gradients is None else gradients[index] for index in edges_by_index
        ]
        edges = list(edges_by_index.values())
        computed = torch.autograd.grad(
            edges, weights, output_gradients, retain_graph=True, allow_unused=True
        )
        for weight, gradient in zip(weights, computed, strict=True):
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def backward_weight_one_chunk(
        self,
        bwd_chunk_id: int,
        last_backward: bool = False,  # noqa: FBT001, FBT002 - torch's
    ) -> None:
        """Compute the weights' gradients of a micro-batch after its inputs' gradients."""
        assert self.passes is not None
        with self.passes.observer.phase("backward"), self.passes.backward_pass(bwd_chunk_id):
            if not self.passes.failures:
                with self.passes.failures.catching(bwd_chunk_id):
                    super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


class Torch212Stage(ZeroStage):
    """Chunk for torch 2.12 and older, where inputs may have no gradient.

    There an integer input, or one that the chunk does not use, is an error.
    """

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends after a backward, with zeros for missing gradients."""
        if self._received is not None:
            pairs = zip(self.bwd_cache[bwd_chunk_id], self._received.parts, strict=True)
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros(shape, dtype=dtype, device=self.device)
                if flows and gradient is None
                else gradient
                for gradient, (shape, dtype, flows) in pairs
            )
        return super().get_bwd_send_ops(bwd_chunk_id)

    def backward_maybe_with_nosync(
        self,
        backward_type: str,
        bwd_kwargs: dict[str, Any],
        last_backward: bool = False,  # noqa: FBT001, FBT002 - torch's
    ) -> Any:
        """Run backward: ``full``, or a half, for the ``input`` or the ``weight`` gradients."""
        if backward_type != "input":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        return keep_weight_gradients(
            bwd_kwargs["stage_output"],
            bwd_kwargs["output_grads"],
            bwd_kwargs["input_values"],
            [weight for weight in self.submod.parameters() if weight.requires_grad],
        )

    def _create_grad_send_info(self, args_recv_info: tuple[Any, ...]) -> list[int | None]:
        assert self._received is not None
        every = zip(args_recv_info, self._received.parts, strict=True)
        return [info.source if flows else None for info, (_, _, flows) in every]


class Torch211Stage(Torch212Stage):
    """Chunk for torch 2.7 to 2.11, where outputs may have no gradient.

    There a stage expects a gradient of every output, and keeps outputs and gradients until the
    batch ends.
    """

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch forward."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.output_chunks.clear()
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends after a forward."""
        chunks: Any = {fwd_chunk_id: self.fwd_cache[fwd_chunk_id][0]}
        self.output_chunks = chunks  # torch 2.7 reads the output here
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        self.output_chunks = []
        return operations

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run one micro-batch backward; only for the inputs' gradients unless ``full``."""
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        received: Any = self.args_recv_info[bwd_chunk_id] if self._received is not None else ()
        for info in received:
            info.buffer.grad = None  # ``bwd_cache`` keeps it until it is sent

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        operations = super()._get_init_p2p_neighbors_ops()
        for operation in operations:  # torch 2.9 sends integers but receives floats
            operation.tensor = operation.tensor.float()
        return operations

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        before, self.has_backward = self.has_backward, False  # no buffer requires a gradient yet
        try:
            return super()._prepare_forward_infra(*args, **kwargs)
        finally:
            self.has_backward = before

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        assert self._received is not None
        every: Any = zip(self.args_recv_info[fwd_chunk_id], self._received.parts, strict=True)
        return tuple(info.buffer.requires_grad_(flows) for info, (_, _, flows) in every)

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> Any:
        every: Any = super()._create_grad_recv_info(act_send_info)
        flowing = [flows for _, _, flows in self._given.parts]
        return tuple(info if flows else None for info, flows in zip(every, flowing, strict=False))

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        return tuple(info and info.buffer for info in self.grad_recv_info[bwd_chunk_id])

    def _validate_fwd_outputs(self, *_: Any) -> None:
        """Do nothing: shapes of the last chunk, and strides, may differ; see ``_check``."""


def stage_class() -> type[ZeroStage]:
    """Return the class of chunks for the installed torch."""
    if hasattr(PipelineStage, "_get_grad_send_meta"):  # torch 2.13
        return ZeroStage
    return Torch212Stage if hasattr(PipelineStage, "_warmup_forward_vote") else Torch211Stage


def _copy_if_shared(output: Tensor, inner: set[Node]) -> Tensor:
    """Copy an output that is used elsewhere, because a split backward detaches outputs.

    Args:
        output: A view, a received tensor, or another output.
        inner: Nodes from which other outputs were computed.
    """
    shared = output.is_leaf or output._is_view() or output.grad_fn in inner  # noqa: SLF001
    return output.clone() if output.requires_grad and shared else output


def _inner_nodes(outputs: Iterable[Any]) -> set[Node]:
    """Return the nodes from which outputs were computed, without the outputs' own nodes."""
    ends = [out.grad_fn for out in outputs if isinstance(out, Tensor) and out.grad_fn is not None]
    if len(ends) < 2:  # a single output is not computed from itself
        return set()
    nodes: set[Node] = set()
    while ends:
        for origin, _ in ends.pop().next_functions:
            if origin is not None and origin not in nodes:
                nodes.add(origin)
                ends.append(origin)
    return nodes


def _depends(output: Tensor, leaves: set[int]) -> bool:
    """Return whether an output was computed from any of some leaves, given by ids."""
    if id(output) in leaves:
        return True
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in leaves:
            return True
        seen.add(node)
        nodes += [origin for origin, _ in node.next_functions]
    return False


def _contiguous(operations: list[dist.P2POp]) -> list[dist.P2POp]:
    """Copy tensors that are not contiguous, such as transposed ones, which cannot be sent."""
    for operation in operations:
        operation.tensor = operation.tensor.contiguous()
    return operations


def _examples(signature: Signature, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(shape, dtype=dtype, device=device).requires_grad_(flows)
        for shape, dtype, flows in signature.parts
    )
