"""Master weights and optimizer states in memory, stepped bucket by bucket."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.errors import ConfigError
from zerotrial.engine.protocols import ENGINE_PARTS, Updater, UpdaterInputs
from zerotrial.engine.update.checkpoint_support import SavableStates
from zerotrial.engine.update.optimizer_states import (
    make_states,
    other_states,
    read_scalars,
    set_other_states,
    split_parameter,
    tensors_within,
    write_scalars,
)

__all__ = [
    "ElementwiseUpdater",
    "FullParameterUpdater",
    "UpdaterBase",
    "build_offloaded",
    "build_updater",
    "cuts_within",
    "is_within",
    "step_scaled",
]


def build_updater(inputs: UpdaterInputs) -> "ElementwiseUpdater | FullParameterUpdater":
    """Return the updater that the optimizer permits."""
    if inputs.shapes is None:
        return ElementwiseUpdater(inputs)
    return FullParameterUpdater(inputs)


def build_offloaded(inputs: UpdaterInputs) -> Updater:
    """Return the updater for ``offload_optimizer.device``.

    Raises:
        ConfigError: If the device is nvme and no directory is configured.
        OffloadError: If the directory lacks room for the states.
    """
    options = inputs.config.zero_optimization.offload_optimizer
    if options.device == "nvme" and options.nvme_path is None:
        key = "zero_optimization.offload_optimizer.nvme_path"
        problem = f"{key}: must name a directory when device is nvme"
        raise ConfigError(inputs.config.source, [problem])
    updater: Updater
    if options.device == "nvme":
        updater = ENGINE_PARTS["nvme_optimizer"](inputs)
    elif options.device == "cpu" and inputs.device.type != "cpu":
        updater = ENGINE_PARTS["cpu_optimizer"](inputs)
    else:
        updater = build_updater(inputs)
    return updater


class UpdaterBase:
    """Base class of updaters: the optimizer, its parameters by bucket, and their numbers."""

    optimizer: torch.optim.Optimizer
    _full_parameters: bool
    """Whether the optimizer gets full parameters."""

    _parameters: list[list[nn.Parameter]]
    """For each bucket, the tensors that the optimizer updates; views of the bucket's master."""

    _spans: list[list[slice]]
    """Range of each of them in the bucket's shard."""

    _members: list[tuple[int, nn.Parameter]]
    """All of them, each with the index of its group."""

    _frozen: list[list[slice]]
    """For each bucket, the elements that steps do not update."""

    def _build(
        self, inputs: UpdaterInputs, parameters: list[list[nn.Parameter]], spans: list[list[slice]]
    ) -> None:
        self._frozen = [[] for _ in parameters]
        self._parameters = parameters
        self._spans = spans
        self._members = [
            (group, member)
            for group, members in zip(inputs.group_indices, parameters, strict=True)
            for member in members
        ]
        groups: list[dict[str, Any]] = [{"params": [], **options} for options in inputs.groups]
        for index, members in zip(inputs.group_indices, parameters, strict=True):
            groups[index]["params"].extend(members)
        self.optimizer = inputs.optimizer_factory(groups)
        self._savable = SavableStates(
            self.optimizer, self._members, full_parameters=self._full_parameters
        )

    def freeze(self, index: int, spans: Sequence[slice]) -> None:
        """Exclude elements from all further steps: weights, states and step counts."""
        self._split(index, spans)
        self._frozen[index] = list(spans)

    def _split(self, index: int, spans: Sequence[slice]) -> None:
        """Make the optimizer update each span of flat parameters separately from all others."""
        for position, span in reversed(list(enumerate(self._spans[index]))):
            cuts = cuts_within(span, spans)
            if not cuts:
                continue
            member = self._parameters[index][position]
            parts = split_parameter(self.optimizer, member, [cut - span.start for cut in cuts])
            bounds = [span.start, *cuts, span.stop]
            self._parameters[index][position : position + 1] = parts
            self._spans[index][position : position + 1] = [
                slice(a, b) for a, b in itertools.pairwise(bounds)
            ]
            index_of_member = next(
                i for i, (_, candidate) in enumerate(self._members) if candidate is member
            )
            group = self._members[index_of_member][0]
            self._members[index_of_member : index_of_member + 1] = [(group, part) for part in parts]
            self._savable.replace(member, parts, self._members)

    def _stepped(self, index: int) -> list[tuple[nn.Parameter, slice]]:
        """Return the parameters of a bucket that a step updates, and their ranges."""
        pairs = list(zip(self._parameters[index], self._spans[index], strict=True))
        frozen = self._frozen[index]
        if not frozen:
            return pairs
        return [(p, span) for p, span in pairs if not is_within(span, frozen)]

    def member_scalars(self, index: int) -> list[tuple[slice, dict[str, float]]]:
        """Return the numbers of the optimizer by part of a bucket's shard."""
        return [
            (span, read_scalars(self.optimizer, [(0, member)]))
            for member, span in zip(self._parameters[index], self._spans[index], strict=True)
        ]

    def set_member_scalars(self, index: int, span: slice, scalars: Mapping[str, float]) -> None:
        """Restore the numbers of :meth:`member_scalars` for the elements of a span."""
        self._split(index, [span])
        for member, member_span in zip(self._parameters[index], self._spans[index], strict=True):
            if is_within(member_span, [span]):
                write_scalars(self.optimizer, [(0, member)], scalars)

    def set_other_states(self, index: int, position: int, values: Mapping[str, Any]) -> None:
        """Restore one parameter's states; call it after :meth:`set_scalars`."""
        set_other_states(self.optimizer, self._parameters[index][position], values)

    def scalars(self) -> dict[str, float]:
        """Return numbers of the optimizer, e.g. ``group0.step``: one parameter's for its group."""
        return read_scalars(self.optimizer, self._members)

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Restore the result of :meth:`scalars`; call it after the states exist."""
        write_scalars(self.optimizer, self._members, scalars)


class _InMemory(UpdaterBase):
    """Base class of both updaters in memory."""

    _masters: list[Tensor]

    @contextmanager
    def states(self, index: int, *, write: bool) -> Iterator[Mapping[str, Tensor]]:
        del write  # the yielded tensors are the memory itself
        tensors: dict[str, Tensor] = {"master": self._masters[index]}
        copies: list[tuple[Tensor, Tensor]] = []
        spans, members = self._spans[index], self._parameters[index]
        for parameter, span in zip(members, spans, strict=True):
            for name, state in self._savable.by_element(parameter).items():
                if len(members) == 1 and state.numel() == self._masters[index].numel():
                    tensors[name] = state.view(-1)
                    continue
                if name not in tensors:
                    tensors[name] = state.new_zeros(self._masters[index].numel())
                part = tensors[name][span].view(parameter.shape)
                part.copy_(state)  # expands a state with one number per row or column
                copies.append((state, part[tuple(slice(0, size) for size in state.shape)]))
        yield tensors
        for state, part in copies:
            state.copy_(part)

    def other_states(self, scalars: Mapping[str, float]) -> list[list[dict[str, Any]]]:
        self._savable.check("save_checkpoint()", scalars)
        states = iter(
            [
                {**other_states(self.optimizer, member, scalars), **self._savable.late(member[1])}
                for member in self._members
            ]
        )
        return [[next(states) for _ in members] for members in self._parameters]

    def prepare_states(self) -> None:
        make_states(self.optimizer, [member for _, member in self._members])
        self._savable.record_first_states()
        self._savable.check("optimizer.step()")

    def tensors_by_kind(self) -> dict[str, list[Tensor]]:
        states = [
            value for state in self.optimizer.state.values() for value in tensors_within(state)
        ]
        return {"master": list(self._masters), "optimizer": states}

    def close(self) -> None:
        """Release files and threads."""


class ElementwiseUpdater(_InMemory):
    """Updater with one flat tensor per bucket, for elementwise optimizers."""

    _full_parameters = False

    def __init__(self, inputs: UpdaterInputs) -> None:
        parameters = [[nn.Parameter(master, requires_grad=True)] for master in inputs.masters]
        self._masters = list(inputs.masters)
        self._build(inputs, parameters, [[slice(0, m.numel())] for m in inputs.masters])
        self._wide: Tensor | None = None
        """Memory for one bucket's gradient in its master's type, on CPU; allocated on demand."""

    def step(self, index: int, gradient: Tensor, scale: float, publish: Tensor) -> bool:
        """Update one bucket's shard."""
        master, stepped = self._masters[index], self._stepped(index)
        gradient = self._widened(gradient, master.dtype)
        for parameter, span in stepped:
            parameter.grad = gradient[span]
        step_scaled(self.optimizer, [parameter for parameter, _ in stepped], scale)
        for parameter, _ in stepped:
            parameter.grad = None
        if publish.data_ptr() != master.data_ptr():
            publish.copy_(master)
        return True

    def finish(self) -> None:
        """End the step: all published weights are written when this returns."""
        self._savable.after_step()

    def tensors_by_kind(self) -> dict[str, list[Tensor]]:
        """Return tensors of kinds ``master`` and ``optimizer`` in this process's memory."""
        wide = [] if self._wide is None else [self._wide]
        return {**super().tensors_by_kind(), "buckets": wide}

    def _widened(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast a gradient; on CPU into reused memory.

        The system maps large allocations page by page, ten times as slow as the cast. On
        other devices torch caches memory itself.
        """
        if gradient.dtype == dtype or gradient.device.type != "cpu":
            return gradient.to(dtype)
        if self._wide is None or self._wide.dtype != dtype:
            largest = max(master.numel() for master in self._masters)
            self._wide = torch.empty(largest, dtype=dtype)
        return self._wide[: gradient.numel()].copy_(gradient)


def is_within(span: slice, spans: Sequence[slice]) -> bool:
    """Return whether one of ``spans`` contains a span that is not empty."""
    return any(outer.start <= span.start < span.stop <= outer.stop for outer in spans)


def cuts_within(span: slice, spans: Sequence[slice]) -> list[int]:
    """Return the bounds of ``spans`` inside of a span, ascending."""
    edges = {edge for inner in spans for edge in (inner.start, inner.stop)}
    return sorted(edge for edge in edges if span.start < edge < span.stop)


def step_scaled(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], scale: float
) -> None:
    """Step on gradients multiplied by ``scale``.

    A fused kernel applies the factor itself, without another pass over the gradients, through the
    attributes that torch's GradScaler uses.

    Args:
        optimizer: Any optimizer.
        parameters: Parameters with a gradient, which may be overwritten.
        scale: Factor of the gradients.
    """
    fused: Any = optimizer
    if scale == 1.0:
        optimizer.step()
    elif not parameters or not _scales(optimizer):
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(scale)
        optimizer.step()
    else:
        device = parameters[0].device
        # filled on the device: a copy from the host would synchronize with it
        fused.grad_scale = torch.full((), 1.0 / scale, device=device)
        fused.found_inf = torch.zeros((), device=device)
        fused.step()
        del fused.grad_scale, fused.found_inf


def _scales(optimizer: torch.optim.Optimizer) -> bool:
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


class FullParameterUpdater(_InMemory):
    """Updater of full parameters, all stepped at once: LAMB, Muon, users' optimizers."""

    _full_parameters = True

    def __init__(self, inputs: UpdaterInputs) -> None:
        assert inputs.shapes is not None
        parameters: list[list[nn.Parameter]] = []
        spans: list[list[slice]] = []
        for master, shapes in zip(inputs.masters, inputs.shapes, strict=True):
            # A scalar becomes one element, so that its states are not taken for counters.
            views = [master[a:b].view(shape or (1,)) for a, b, shape in shapes]
            parameters.append([nn.Parameter(view) for view in views])
            spans.append([slice(a, b) for a, b, _ in shapes])
        self._publish: list[tuple[Tensor, Tensor]] = []
        self._masters = list(inputs.masters)
        self._build(inputs, parameters, spans)

    def step(self, index: int, gradient: Tensor, scale: float, publish: Tensor) -> bool:
        """Update one bucket's shard."""
        master = self._masters[index]
        gradient = gradient.to(master.dtype)
        if scale != 1.0:
            gradient.mul_(scale)
        for parameter, span in self._stepped(index):
            parameter.grad = gradient[span].view(parameter.shape)
        self._publish.append((publish, master))
        return False

    def finish(self) -> None:
        """End the step: all published weights are written when this returns."""
        self.optimizer.step()
        self._savable.after_step()
        for _, parameter in self._members:
            parameter.grad = None
        for publish, master in self._publish:
            if publish.data_ptr() != master.data_ptr():
                publish.copy_(master)
        self._publish.clear()
