"""Agreement of two ranks, which are spawned once for all tests."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

import zerotrial
from tests.engine.ranks import run_on_ranks
from tests.trial.helpers import (
    Line,
    LineTrial,
    PlainEngine,
    build,
    fit,
    last_checkpoint,
    make_settings,
    make_spec,
    metrics,
    records,
)
from tests.waiting import until
from zerolab.contract.messages import Directive
from zerotrial import Batch, Epoch, Reducer
from zerotrial.ranks import CollectiveError, Distributed


class RankTrial(LineTrial):
    """Trial that reports its rank; rank 0 has three validation batches, rank 1 two."""

    def __init__(self, context: zerotrial.ZeroTrialContext) -> None:
        super().__init__(context)
        self.rank = context.distributed.rank
        self.total = context.wrap_reducer(sum, name="total")

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        self.total.update(self.rank + 1)
        return {"rank": torch.tensor(float(self.rank))}

    def evaluate_batch(self, dataloader_iter):
        next(dataloader_iter)
        self.total.update(10 * (self.rank + 1))
        value = float(self.rank)
        return {"validation_loss": value, "sum": value, "min": value, "max": value}

    def evaluation_reducer(self):
        return {
            "validation_loss": Reducer.AVG,
            "sum": Reducer.SUM,
            "min": Reducer.MIN,
            "max": Reducer.MAX,
        }

    def build_validation_data_loader(self):
        batches = self.context.get_hparams()["validation_batches"]
        return zerotrial.DataLoader(Line(batches), batch_size=1)


class CollectiveForward(PlainEngine):
    """Engine with a collective forward pass, as at stage 3."""

    def __call__(self, *args: Any) -> Any:
        dist.all_reduce(torch.zeros(1))
        return super().__call__(*args)

    def zero_optimization_stage(self) -> int:
        return 3


class CollectiveTrial(RankTrial):
    def __init__(self, context):
        super().__init__(context)
        context.engines.clear()
        self.engine = context.wrap_model_engine(CollectiveForward(nn.Linear(1, 1)))

    def evaluate_batch(self, dataloader_iter):
        x, _, index = next(dataloader_iter)
        self.engine(x)
        self.total.update(1)
        return {"validation_loss": index.float(), "sum": 1.0, "min": 0.0, "max": 0.0}


def run_on_two_ranks(directory: str) -> dict[str, Any]:
    path, ranks = Path(directory), Distributed.from_environment(cuda=False)
    results: dict[str, Any] = {}

    def run(name: str, trial: Any, settings: Any, **hparams: Any) -> Any:
        spec = make_spec(path / name, hparams, slots=2)
        return fit(spec, trial, settings, ranks)

    run("even", RankTrial, make_settings(4, report_period=Batch(2)), validation_batches=4)
    run("uneven", RankTrial, make_settings(1), validation_batches=5)
    run("lockstep", CollectiveTrial, make_settings(1), validation_batches=5)
    run("starving", CollectiveTrial, make_settings(1), validation_batches=1)

    settings = make_settings(max_length=Epoch(2))
    _, trial = run("data", LineTrial, settings, samples=22)
    results["seen"] = trial.seen

    class Stop(LineTrial):
        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            if ranks.rank == 1 and batch_idx == 3:
                self.context.set_stop_requested(True)
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    stop_reason, trial = run("stop", Stop, make_settings(1_000_000, report_period=None))
    results["stop"] = (stop_reason.name, len(trial.seen))

    spec = make_spec(path / "preempt", slots=2)
    controller, session = build(spec, settings=make_settings(1_000_000), distributed=ranks)
    if ranks.rank == 0:
        session._poller.directive = Directive("preempt", version=1)
    stop_reason = controller.run()
    session.close(stop_reason)
    results["preempt"] = (stop_reason.name, controller.steps)

    controller, session = build(spec, settings=make_settings(1_000_000), distributed=ranks)
    if ranks.rank == 1:
        session._poller._received = True  # as SIGTERM does
    results["sigterm"] = (controller.run().name, controller.steps)
    session.close(None)

    two_machines = Distributed(ranks.rank, 2, 0, 1)  # as on two machines
    spec = make_spec(path / "machines", slots=2)
    controller, session = build(spec, settings=make_settings(2), distributed=two_machines)
    train_batch = controller._trial.train_batch

    def train_after_sample(*arguments: Any) -> Any:
        assert controller._machines is not None
        until("the machine is sampled", lambda: controller._machines.sampled)
        return train_batch(*arguments)

    controller._trial.train_batch = train_after_sample
    session.close(controller.run())

    results["gathered"] = (ranks.allgather(ranks.rank), ranks.gather(ranks.rank))
    results["broadcast"] = ranks.broadcast({"from": ranks.rank})
    ranks.barrier()
    short_timeout = Distributed(ranks.rank, 2)
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):  # Gloo keeps its first timeout
        short_timeout._group = dist.new_group(timeout=timedelta(seconds=10))
    if ranks.rank == 0:  # set only now, since the ranks need time to make a group
        short_timeout.timeout_s = 2
        distributed_c10d._set_pg_timeout(timedelta(seconds=2), short_timeout._group)
        with pytest.raises(CollectiveError) as caught:
            short_timeout.allgather(1, "reducing training metrics after batch 7")
        results["hang"] = str(caught.value)
    ranks.barrier()
    return results


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("two")
    return path, run_on_ranks(run_on_two_ranks, 2, str(path))


pytestmark = pytest.mark.processes


def test_metrics_are_averaged_over_ranks(two) -> None:
    path, _ = two
    training = metrics(path / "even", "training")
    assert [training[n]["rank"] for n in (2, 4)] == [0.5, 0.5]
    validation = metrics(path / "even", "validation")[4]
    reduced = [validation[name] for name in ("validation_loss", "sum", "min", "max")]
    assert reduced == [0.5, 2, 0, 1]


@pytest.mark.needs_extension("metric_reducers")
def test_reducers_get_values_of_all_ranks_once(two) -> None:
    path, _ = two
    training = metrics(path / "even", "training")
    assert [training[n]["total"] for n in (2, 4)] == [6, 6]
    assert metrics(path / "even", "validation")[4]["total"] == 60


def test_validation_is_weighted_by_batches(two) -> None:
    path, _ = two
    assert metrics(path / "uneven", "validation")[1]["validation_loss"] == 2 / 5


def test_short_rank_joins_collective_forwards(two) -> None:
    path, _ = two
    lockstep = metrics(path / "lockstep", "validation")[1]
    assert (lockstep["validation_loss"], lockstep["sum"], lockstep["total"]) == (2, 5, 5)
    starving = metrics(path / "starving", "validation")[1]
    assert (starving["validation_loss"], starving["sum"], starving["total"]) == (0, 1, 1)


def test_ranks_share_each_epoch(two) -> None:
    _, (rank_0, rank_1) = two
    # 22 samples, 4 a batch: 6 batches an epoch, the last one filled up with two samples again.
    assert len(rank_0["seen"]) == len(rank_1["seen"]) == 12
    pairs = zip(rank_0["seen"][:6], rank_1["seen"][:6], strict=True)
    epoch = [x for pair in pairs for part in pair for x in part]
    assert sorted(epoch[:22]) == list(range(22))
    assert epoch[22:] == epoch[:2]


def test_ranks_stop_after_the_same_batch(two) -> None:
    path, (rank_0, rank_1) = two
    stop_reasons = {"stop": "STOP_REQUESTED", "preempt": "PREEMPTED", "sigterm": "PREEMPTED"}
    for case, name in stop_reasons.items():
        assert rank_0[case] == rank_1[case]
        assert rank_0[case][0] == name
        assert rank_0[case][1] < 1_000_000
    assert last_checkpoint(path / "stop").steps_completed == rank_0["stop"][1]


def test_chief_reports_metrics_of_all_machines(two) -> None:
    path, _ = two
    system = [set(r["values"]) for r in records(path / "machines") if r["group"] == "system"]
    assert {"machine0/cpu_percent", "machine1/cpu_percent"} <= set.union(*system)


def test_distributed_exchanges_objects(two) -> None:
    _, (rank_0, rank_1) = two
    assert rank_0["gathered"] == ([0, 1], [0, 1])
    assert rank_1["gathered"] == ([0, 1], None)
    assert rank_1["broadcast"] == {"from": 0}


def test_collective_timeout_names_rank_and_operation(two) -> None:
    _, (rank_0, _) = two
    message = rank_0["hang"]
    assert "rank 0 of 2: reducing training metrics after batch 7: " in message
    assert "did not answer within 2 s" in message
    assert "ZEROLAB_COLLECTIVE_TIMEOUT" in message
