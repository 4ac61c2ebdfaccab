"""Muon for matrices and AdamW for other parameters, as one optimizer with one list of groups."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from zerotrial.extensions.optimizers.per_parameter import loss_of

__all__ = ["MuonWithAdamW"]

_ADAM = {"betas", "eps"}
_MUON = {"momentum", "nesterov", "ns_steps"}


class MuonWithAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` on parameters with two dimensions, fused AdamW on all others.

    Both use the states and groups of this optimizer, so that schedules and checkpoints see one.

    Args:
        params: Parameters or groups.
        lr: Learning rate of both, unless ``muon_lr`` or ``adam_lr`` is set.
        weight_decay: Decoupled weight decay of both.
        momentum: Momentum of Muon.
        nesterov: Whether Muon uses Nesterov momentum.
        ns_steps: Newton-Schulz iterations of Muon.
        muon_lr: Learning rate of Muon; None means ``lr``. Schedules scale both equally.
        adam_lr: Learning rate of AdamW; None means ``lr``.
        betas: Decay rates of AdamW's moments.
        eps: AdamW's epsilon.

    Raises:
        ConfigError: If this version of torch has no Muon (before 2.9).

    References:
        Jordan et al., https://kellerjordan.github.io/posts/muon/.
    """

    elementwise = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_steps: int = 5,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "betas": betas,
            "eps": eps,
        }
        super().__init__(params, options)
        self._muon_share = 1.0 if muon_lr is None or lr == 0 else muon_lr / lr
        self._adam_share = 1.0 if adam_lr is None or lr == 0 else adam_lr / lr
        self._muon = self._inner(torch.optim.Muon, _MUON, matrices=True)
        self._adam = self._inner(torch.optim.AdamW, _ADAM, matrices=False)

    def _inner(
        self, cls: Any, keys: set[str], *, matrices: bool
    ) -> tuple[torch.optim.Optimizer, list[dict[str, Any]]] | None:
        """Return an optimizer of a subset of the parameters, with the outer group of each group."""
        groups, outer = [], []
        for group in self.param_groups:
            members = [p for p in group["params"] if (p.dim() == 2) == matrices]
            if members:
                options = {key: group[key] for key in keys}
                groups.append({"params": members, "weight_decay": group["weight_decay"], **options})
                outer.append(group)
        if not groups:
            return None
        inner: torch.optim.Optimizer = cls(groups) if matrices else cls(groups, fused=True)
        inner.state = self.state
        return inner, outer

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = loss_of(closure)
        for part, share in ((self._muon, self._muon_share), (self._adam, self._adam_share)):
            if part is None:
                continue
            inner, outer = part
            for group, source in zip(inner.param_groups, outer, strict=True):
                group["lr"] = source["lr"] * share
                group["weight_decay"] = source["weight_decay"]
            inner.step()
        return loss
