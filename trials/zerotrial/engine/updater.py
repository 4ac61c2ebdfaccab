"""Master weights and optimizer states in memory, stepped bucket by bucket."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.errors import ZerolabError
from zerotrial.engine.parts import UpdaterInputs

__all__ = ["ElementwiseUpdater", "WholeUpdater", "build_updater"]


def build_updater(inputs: UpdaterInputs) -> "ElementwiseUpdater | WholeUpdater":
    """Choose the updater that the optimizer allows."""
    if inputs.shapes is None:
        return ElementwiseUpdater(inputs)
    return WholeUpdater(inputs)


class _InMemory:
    """What both updaters share: the optimizer, its parameters by bucket, and their states."""

    optimizer: torch.optim.Optimizer
    _masters: list[Tensor]
    _parameters: list[list[nn.Parameter]]
    """For each bucket, the tensors that the optimizer updates; views of the bucket's master."""

    _spans: list[list[slice]]
    """Where each of them lies in the bucket's shard."""

    _group_indices: Sequence[int]

    def _build(
        self, inputs: UpdaterInputs, parameters: list[list[nn.Parameter]], spans: list[list[slice]]
    ) -> None:
        self._masters = list(inputs.masters)
        self._parameters = parameters
        self._spans = spans
        self._group_indices = inputs.group_indices
        groups: list[dict[str, Any]] = [{"params": [], **options} for options in inputs.groups]
        for index, members in zip(inputs.group_indices, parameters, strict=True):
            groups[index]["params"].extend(members)
        self.optimizer = inputs.optimizer_factory(groups)

    @contextmanager
    def states(self, index: int, *, write: bool) -> Iterator[Mapping[str, Tensor]]:
        """See :class:`~zerotrial.engine.parts.Updater`."""
        del write  # what is lent is the memory itself
        lent: dict[str, Tensor] = {"master": self._masters[index]}
        copies: list[tuple[Tensor, Tensor]] = []
        spans, members = self._spans[index], self._parameters[index]
        for parameter, span in zip(members, spans, strict=True):
            for name, state in self._tensor_states(parameter).items():
                if len(members) == 1 and state.numel() == self._masters[index].numel():
                    lent[name] = state.view(-1)
                    continue
                whole = lent.setdefault(name, state.new_zeros(self._masters[index].numel()))
                whole[span].copy_(state.reshape(-1))
                copies.append((state, whole[span]))
        yield lent
        for state, part in copies:
            state.copy_(part.view(state.shape))

    def _tensor_states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        found = {}
        for name, value in self.optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            if value.numel() != parameter.numel():
                if value.numel() == 1:
                    continue
                msg = (
                    f"{type(self.optimizer).__name__}: its state {name!r} has shape "
                    f"{tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}; "
                    "states of another shape than the parameter cannot be checkpointed"
                )
                raise ZerolabError(msg)
            found[name] = value
        return found

    def prepare_states(self) -> None:
        """See :class:`~zerotrial.engine.parts.Updater`."""
        members = [p for bucket in self._parameters for p in bucket if not self.optimizer.state[p]]
        if not members:
            return
        # The optimizer makes its states in a first step. It takes it on copies, with gradients of
        # zero, and what it counted is set back.
        originals = [parameter.data for parameter in members]
        for parameter in members:
            parameter.data = parameter.data.clone()
            parameter.grad = torch.zeros_like(parameter)
        try:
            type(self.optimizer).step(self.optimizer)  # not the schedule's counting wrapper
        finally:
            for parameter, original in zip(members, originals, strict=True):
                parameter.data = original
                parameter.grad = None
        for parameter in members:
            for name, value in self.optimizer.state[parameter].items():
                if name == "step":
                    self.optimizer.state[parameter][name] = value * 0

    def scalars(self) -> dict[str, float]:
        """See :class:`~zerotrial.engine.parts.Updater`."""
        found: dict[str, float] = {}
        for group, members in zip(self._group_indices, self._parameters, strict=True):
            for parameter in members:
                for name, value in self.optimizer.state.get(parameter, {}).items():
                    if _is_scalar(value):
                        found.setdefault(f"group{group}.{name}", float(value))
        return found

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """See :class:`~zerotrial.engine.parts.Updater`."""
        for group, members in zip(self._group_indices, self._parameters, strict=True):
            for parameter in members:
                state = self.optimizer.state[parameter]
                for key, number in scalars.items():
                    owner, _, name = key.partition(".")
                    if owner != f"group{group}":
                        continue
                    old = state.get(name)
                    if isinstance(old, Tensor):
                        old.fill_(number)
                    else:
                        state[name] = type(old)(number) if old is not None else number

    def held(self) -> dict[str, list[Tensor]]:
        """See :class:`~zerotrial.engine.parts.Updater`."""
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return {"master": list(self._masters), "optimizer": states}

    def close(self) -> None:
        """See :class:`~zerotrial.engine.parts.Updater`."""


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


class ElementwiseUpdater(_InMemory):
    """One flat tensor for each bucket: for optimizers whose elements do not know each other."""

    def __init__(self, inputs: UpdaterInputs) -> None:
        parameters = [[nn.Parameter(master, requires_grad=True)] for master in inputs.masters]
        self._build(inputs, parameters, [[slice(0, m.numel())] for m in inputs.masters])
        self._takes_scale = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))

    def step(self, index: int, gradient: Tensor, scale: float, publish: Tensor) -> bool:
        """See :class:`~zerotrial.engine.parts.Updater`."""
        (parameter,) = self._parameters[index]
        gradient = gradient.to(parameter.dtype)
        if scale != 1.0:
            gradient.mul_(scale)
        parameter.grad = gradient
        self.optimizer.step()
        parameter.grad = None
        master = self._masters[index]
        if publish.data_ptr() != master.data_ptr():
            publish.copy_(master)
        return True

    def finish(self) -> None:
        """See :class:`~zerotrial.engine.parts.Updater`."""


class WholeUpdater(_InMemory):
    """Whole parameters in their own shapes, all stepped at once: LAMB, Muon, users' optimizers."""

    def __init__(self, inputs: UpdaterInputs) -> None:
        assert inputs.shapes is not None
        parameters: list[list[nn.Parameter]] = []
        spans: list[list[slice]] = []
        for master, shapes in zip(inputs.masters, inputs.shapes, strict=True):
            parameters.append([nn.Parameter(master[a:b].view(shape)) for a, b, shape in shapes])
            spans.append([slice(a, b) for a, b, _ in shapes])
        self._publish: list[tuple[Tensor, Tensor]] = []
        self._build(inputs, parameters, spans)

    def step(self, index: int, gradient: Tensor, scale: float, publish: Tensor) -> bool:
        """See :class:`~zerotrial.engine.parts.Updater`."""
        master = self._masters[index]
        gradient = gradient.to(master.dtype)
        if scale != 1.0:
            gradient.mul_(scale)
        for parameter, span in zip(self._parameters[index], self._spans[index], strict=True):
            parameter.grad = gradient[span].view(parameter.shape)
        self._publish.append((publish, master))
        return False

    def finish(self) -> None:
        """See :class:`~zerotrial.engine.parts.Updater`."""
        self.optimizer.step()
        for members in self._parameters:
            for parameter in members:
                parameter.grad = None
        for publish, master in self._publish:
            if publish.data_ptr() != master.data_ptr():
                publish.copy_(master)
        self._publish.clear()
