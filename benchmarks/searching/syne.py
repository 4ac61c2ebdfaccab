"""Syne Tune's searchers behind our searchers' face; measured when they are installed.

Syne Tune is no part of the group ``bench``: it requires xgboost, whose wheels for Linux bring a
part of CUDA (``nvidia-nccl-cu12``). Into an environment of its own (0.5 GB) it goes without that:
``pip install --no-deps syne-tune xgboost-cpu``, then ``pip install huggingface_hub pandas
scikit-learn scipy statsmodels sortedcontainers dill tqdm psutil`` and what Zerolab's own core
needs. ``_speed_up`` takes four fifths of ASHABORE's time away and half of ASHACQR's, and changes
no trial.
"""

import importlib.util
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar

from benchmarks.searching.objective import EPOCHS
from benchmarks.searching.peers import Endless
from zerolab.searcher import Operation, Stop

__all__ = ["SyneTuneSearcher", "is_installed"]


def is_installed() -> bool:
    return importlib.util.find_spec("syne_tune") is not None


class SyneTuneSearcher(Endless):
    """An ASHA of the real Syne Tune, which is told every value and may stop a trial at a rung.

    It knows no leaves that exist only sometimes: it sees all of them, and those that a choice
    excludes have no effect. A trial that diverges has the worst value that was seen so far, and
    is stopped.

    Args:
        space: What is searched.
        seed: Of the searcher.
        kind: ``ASHABORE`` or ``ASHACQR``.
    """

    def __init__(self, space: Mapping[str, Any], seed: int, kind: str) -> None:
        super().__init__(space, seed)
        import numpy as np
        import syne_tune.config_space as domains
        from syne_tune.backend.trial_status import Trial
        from syne_tune.optimizer import baselines
        from syne_tune.optimizer.scheduler import SchedulerDecision

        np.random.seed(seed)  # Syne Tune draws from it
        leaves = {
            str(index): domains.choice([str(at) for at in range(d.size)])
            if d.kind == "categorical"
            else domains.randint(0, d.size - 1) if d.kind == "int"
            else domains.uniform(0.0, 1.0)
            for index, d in enumerate(self.space.dimensions)
        }  # fmt: skip
        self.scheduler = getattr(baselines, kind)(
            leaves, metric="loss", time_attr="epoch", max_t=EPOCHS, random_seed=seed
        )
        _speed_up(self.scheduler.searcher)
        self.make_trial: Any = Trial
        self.stop = SchedulerDecision.STOP
        self.trials: dict[int, Any] = {}
        self.worst = 0.0

    def draw(self, trial_id: int) -> dict[str, Any]:
        config = self.scheduler.suggest().config
        trial = self.make_trial(trial_id, config, datetime.now())  # noqa: DTZ005 - unused
        self.trials[trial_id] = trial
        self.scheduler.on_trial_add(trial)
        coordinates = [
            float(config[str(index)])
            if d.kind != "int"
            else (int(config[str(index)]) + 0.5) / d.size
            for index, d in enumerate(self.space.dimensions)
        ]
        return self.space.hparams(self.space.snap(coordinates))

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        trial = self.trials.get(trial_id)
        if trial is None:
            return []
        if math.isfinite(metric):
            self.worst = max(self.worst, metric)
        told = {"loss": metric if math.isfinite(metric) else self.worst, "epoch": int(length)}
        decision = self.scheduler.on_trial_result(trial, told)
        if decision == self.stop or not math.isfinite(metric):
            del self.trials[trial_id]
            return [Stop(trial_id)]
        return []


def _speed_up(searcher: Any) -> None:
    """Have the same trials in less time.

    BORE asks its classifier for 500 candidates one by one: they are drawn ahead, in the same order,
    and asked for at once. CQR fits hundreds of boosted trees, whose leaves scikit-learn fills with
    a general percentile of weighted values: here all weights are 1, and what it has checked
    once need not be checked in every tree.

    Args:
        searcher: Of the scheduler.
    """
    import sklearn
    from sklearn._loss import loss

    sklearn.set_config(skip_parameter_validation=True, assume_finite=True)
    loss._weighted_percentile = _percentile
    if hasattr(searcher.searcher_cls, "_get_random_config"):
        searcher.searcher_cls = _at_once(searcher.searcher_cls)


def _percentile(values: Any, weights: Any, rank: float) -> Any:
    """The smallest value that so many percent of all are not above; the weights are all 1."""
    import numpy as np

    assert (weights == 1).all()
    reached = np.arange(1.0, len(values) + 1)
    at = int(np.searchsorted(reached, rank / 100 * reached[-1]))
    return np.sort(values)[min(at, len(values) - 1)]


def _at_once(bore: Any) -> Any:
    """BORE with candidates drawn ahead, and their losses from one call of the classifier."""
    import numpy as np

    class AtOnce(bore):  # type: ignore[misc]  # it is not typed
        ahead: ClassVar[list[Any]] = []
        losses: ClassVar[dict[bytes, Any]] = {}

        def _train_model(self, inputs: Any, targets: Any) -> bool:
            trained = bool(super()._train_model(inputs, targets))
            if trained:
                drawn = [super(AtOnce, self)._get_random_config() for _ in range(self.feval_acq)]
                points = np.array([self._hp_ranges.to_ndarray(one) for one in drawn])
                values = self._loss(points)
                self.losses = {at.tobytes(): v for at, v in zip(points, values, strict=True)}
                self.ahead = drawn[::-1]
            return trained

        def _get_random_config(self) -> Any:
            return self.ahead.pop() if self.ahead else super()._get_random_config()

        def _loss(self, at: Any) -> Any:
            known = self.losses.get(at.tobytes()) if at.ndim == 1 else None
            return super()._loss(at) if known is None else [known]

    return AtOnce
