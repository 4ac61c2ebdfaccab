"""Results of experiments, and the reasons why there is none."""

from typing import Any

import pytest

from tests.server.helpers import Server, checkpoint, metrics, training, validation
from zerolab.contract.spec import EXIT_INVALID_HP


def test_result_clears_problem(server: Server) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    assert server.trial()["result_problem"] is None
    server.report(spec.run_id, validation(100, "NaN"), validation(101, 0.5))
    server.exit(spec.run_id, 0)
    assert server.trial()["result_problem"] is None
    assert server.experiment()["result_problem"] is None


def test_trial_without_validation_has_no_result(server: Server) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    server.report(spec.run_id, training(100, 0.5))
    server.exit(spec.run_id, 0)
    trial, experiment = server.trial(), server.experiment()
    assert (trial["state"], experiment["state"]) == ("COMPLETED", "COMPLETED")
    assert trial["result_problem"] == "it ended without a validation"
    problem = "no trial reported a number for the searcher's metric 'loss'"
    assert experiment["result_problem"] == problem
    (listed,) = server.get("/experiments")["experiments"]
    assert listed["result_problem"] == problem


def test_metric_never_finite_is_no_result(server: Server) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    server.report(spec.run_id, metrics("validation", 100, loss="NaN"))
    server.exit(spec.run_id, 0)
    assert server.trial()["result_problem"] == "no validation gave the searcher's metric a number"


@pytest.mark.parametrize("entrypoint", ["echo hello", "model_def:Trial"])
def test_single_without_metric_completes(server: Server, entrypoint: str) -> None:
    server.submit(entrypoint=entrypoint, searcher={"name": "single", "max_length": 100})
    server.add_agent()
    spec = server.begin()
    assert spec.fit is not None
    assert spec.fit.metric is None
    server.report(spec.run_id, validation(100, 0.5), checkpoint(100))
    server.exit(spec.run_id, 0)
    trial, experiment = server.trial(), server.experiment()
    assert (experiment["state"], experiment["metric"]) == ("COMPLETED", None)
    assert (trial["state"], trial["result_problem"]) == ("COMPLETED", None)
    assert experiment["result_problem"] is None
    assert trial["latest_checkpoint"] == checkpoint(100).uuid
    condition = '[["result", "=", "yes"]]'
    assert server.get("/experiments/1/trials", where=condition)["total"] == 1
    best = server.get("/experiments/1/best-checkpoint")["best_checkpoint"]
    assert best == {"checkpoint": None, "validation": None, "note": None}


def test_best_checkpoint_uses_its_own_metric(server: Server) -> None:
    """The best validation has no checkpoint; another trial has the best checkpoint."""
    server.submit(**{**GRID, "entrypoint": "echo hello"})
    server.add_agent(slots=3)
    for trial_id, losses in ((1, (0.3, 0.1)), (2, (0.2, 0.4)), (3, ("NaN", 0.9))):
        spec = server.begin(trial_id)
        server.report(spec.run_id, validation(5, losses[0]), checkpoint(5, str(trial_id)))
        server.report(spec.run_id, validation(10, losses[1]))
        server.exit(spec.run_id, 0)
    experiment = server.experiment()
    assert (experiment["best_validation"], experiment["best_trial_id"]) == (0.1, 1)
    best = server.get("/experiments/1/best-checkpoint")["best_checkpoint"]
    assert (best["checkpoint"]["trial_id"], best["validation"]) == (2, 0.2)
    assert "(loss 0.1 at batch 10 of trial 1) has no checkpoint" in best["note"]
    assert "save a checkpoint after each new best validation" in best["note"]
    first = server.get("/trials/1/best-checkpoint")["best_checkpoint"]
    assert (first["checkpoint"]["uuid"], first["validation"]) == (checkpoint(5, "1").uuid, 0.3)
    assert first["note"] == best["note"]
    third = server.get("/trials/3/best-checkpoint")["best_checkpoint"]
    assert (third["checkpoint"], third["note"] is None) == (None, False)


@pytest.mark.needs_extension("checkpoint_removal")
@pytest.mark.parametrize("policy", ["none", "best"])
def test_missing_checkpoint_names_its_remedy(server: Server, policy: str) -> None:
    server.submit(checkpoint_policy=policy)
    server.add_agent()
    spec = server.begin()
    server.report(spec.run_id, validation(50, 0.1))
    note = "/experiments/1/best-checkpoint"
    assert server.get(note)["best_checkpoint"]["note"] is None  # it may come yet
    if policy == "best":
        server.report(spec.run_id, checkpoint(50), validation(100, 0.2), checkpoint(100))
    server.exit(spec.run_id, 0)
    if policy == "best":
        assert server.get(note)["best_checkpoint"]["note"] is None
        server.request("DELETE", f"/checkpoints/{checkpoint(50).uuid}")
        best = server.get(note)["best_checkpoint"]
        assert best["validation"] == 0.2
        assert server.trial()["best_checkpoint"] == checkpoint(100).uuid
        assert "it was deleted" in best["note"]
    else:
        assert "set checkpoint_policy: best" in server.get(note)["best_checkpoint"]["note"]


def test_invalid_hparams_are_the_reason(server: Server) -> None:
    server.submit()
    server.add_agent()
    server.exit(server.begin().run_id, EXIT_INVALID_HP, "hidden: too wide")
    assert server.trial()["result_problem"] == "hidden: too wide"
    assert server.experiment()["state"] == "COMPLETED"
    assert server.experiment()["result_problem"].endswith("metric 'loss': hidden: too wide")


def test_only_failures_have_a_reason(server: Server) -> None:
    server.submit(max_restarts=0)
    server.add_agent()
    server.exit(server.begin().run_id, 1, "boom")
    assert server.trial()["result_problem"] == server.experiment()["result_problem"] == "boom"
    server.submit()
    server.act("kill", 2)
    assert server.experiment(2)["result_problem"] is None
    assert server.trial(2)["result_problem"] is None


GRID: dict[str, Any] = {
    "hyperparameters": {
        "deepspeed_config": "ds_config.json",
        "n": {"type": "categorical", "vals": [1, 2, 3]},
    },
    "searcher": {"name": "grid", "metric": "loss", "max_length": 10},
}


def test_missing_searcher_metric_fails_only_its_trial(
    server: Server,
) -> None:
    server.submit(**GRID)
    server.add_agent(slots=2)
    first, second = server.begin(1), server.begin(2)
    server.report(second.run_id, validation(5, 0.5))
    server.report(first.run_id, metrics("validation", 5, accuracy=0.5, batches=5, f1=0.1))
    assert [item.spec.trial_id for item in server.work() if item.action == "kill"] == [1]
    server.exit(first.run_id, -9)
    error = "searcher.metric: must be one of the validation metrics, got 'loss'; there are: "
    error += "accuracy, f1"
    assert [trial["state"] for trial in server.trials()] == ["ERROR", "RUNNING", "QUEUED"]
    trial = server.trial()
    assert (trial["error"], trial["result_problem"]) == (error, error)
    assert error in [line["text"] for line in server.get("/trials/1/logs")["logs"]]
    server.exit(second.run_id, 0)
    server.exit(server.begin(3).run_id, 0)
    assert server.experiment()["state"] == "COMPLETED"


def test_later_validation_may_omit_metric(server: Server) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    server.report(spec.run_id, validation(5, 0.5), metrics("validation", 10, accuracy=0.5))
    assert server.experiment()["state"] == "ACTIVE"
    server.exit(spec.run_id, 0)
    assert server.experiment()["result_problem"] is None


def test_unread_hparams_are_listed(server: Server) -> None:
    space = {
        "lr": {"type": "double", "minval": 0, "maxval": 1},
        "momentum": {"type": "double", "minval": 0, "maxval": 1},
        "width": 8,
    }
    searcher = {"name": "random", "metric": "loss", "max_trials": 3, "max_length": 100}
    server.submit(hyperparameters=space, searcher=searcher, max_restarts=0)
    server.add_agent(3)
    first, second, third = (server.begin(number) for number in (1, 2, 3))
    assert server.experiment()["unread_hparams"] == []
    server.exit(first.run_id, 1, unread=["lr"])
    assert server.experiment()["unread_hparams"] == []
    server.exit(second.run_id, 0, unread=["lr", "momentum", "width", "x"])
    assert server.experiment()["unread_hparams"] == ["lr", "momentum"]
    server.exit(third.run_id, 0, unread=["momentum"])
    assert server.experiment()["unread_hparams"] == ["momentum"]
