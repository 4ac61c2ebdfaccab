"""An end without a result is told as such, whatever the state is called."""

from typing import Any

from tests.server.helpers import Server, metrics, training, validation
from zerolab.contract.spec import EXIT_INVALID_HP


def test_a_result_leaves_no_problem(server: Server) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    assert server.trial()["result_problem"] is None
    server.report(spec.run_id, validation(100, "NaN"), validation(101, 0.5))
    server.exit(spec.run_id, 0)
    assert server.trial()["result_problem"] is None
    assert server.experiment()["result_problem"] is None


def test_a_trial_that_never_validates_completes_without_a_result(server: Server) -> None:
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


def test_a_metric_that_is_never_a_number_is_no_result(server: Server) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    server.report(spec.run_id, metrics("validation", 100, loss="NaN"))
    server.exit(spec.run_id, 0)
    assert server.trial()["result_problem"] == "no validation gave the searcher's metric a number"


def test_impossible_hyperparameters_are_the_reason_that_is_given(server: Server) -> None:
    server.submit()
    server.add_agent()
    server.exit(server.begin().run_id, EXIT_INVALID_HP, "hidden: too wide")
    assert server.trial()["result_problem"] == "hidden: too wide"
    assert server.experiment()["state"] == "COMPLETED"
    assert server.experiment()["result_problem"].endswith("metric 'loss': hidden: too wide")


def test_a_failure_is_its_own_reason_and_a_cancellation_is_none(server: Server) -> None:
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


def test_a_searcher_metric_that_the_first_validation_lacks_is_an_error_of_that_trial_alone(
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


def test_a_later_validation_may_lack_the_metric(server: Server) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    server.report(spec.run_id, validation(5, 0.5), metrics("validation", 10, accuracy=0.5))
    assert server.experiment()["state"] == "ACTIVE"
    server.exit(spec.run_id, 0)
    assert server.experiment()["result_problem"] is None
