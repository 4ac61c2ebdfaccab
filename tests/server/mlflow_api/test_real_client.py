"""The client of MLflow against a server; it is not a dependency of the tests."""

import math
import time
from pathlib import Path

import pytest

from tests.server.processes import LiveServer

pytestmark = pytest.mark.processes


@pytest.mark.filterwarnings("ignore")
def test_client_logs_and_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    from mlflow.entities import Metric, Param, RunTag

    server = LiveServer(tmp_path / "home")
    server.start()
    try:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{server.url}/mlflow")
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", server.token)
        client = mlflow.MlflowClient(f"{server.url}/mlflow")
        experiment = client.create_experiment("digits")
        run = client.create_run(experiment, run_name="conv")
        run_id = run.info.run_id
        client.log_param(run_id, "lr", 0.1)
        for step in range(1, 11):
            client.log_metric(run_id, "loss", 1 / step, step=step)
        client.log_metric(run_id, "val/accuracy", math.nan, step=10)
        client.log_text(run_id, "hello", "notes/readme.txt")
        client.set_terminated(run_id)

        (found,) = client.search_runs([experiment], "metrics.loss < 0.5 and params.lr = '0.1'")
        assert (found.info.run_id, found.info.status) == (run_id, "FINISHED")
        history = client.get_metric_history(run_id, "loss")
        assert [(point.step, point.value) for point in history] == [
            (step, 1 / step) for step in range(1, 11)
        ]
        path = client.download_artifacts(run_id, "notes/readme.txt", str(tmp_path))
        assert Path(path).read_text() == "hello"
        (ours,) = server.client().experiments()
        assert (ours.name, ours.state, ours.project) == ("conv", "COMPLETED", "digits")
        assert server.client().trials(ours.id)[0].hparams == {"lr": 0.1}
        largest = client.create_run("0").info.run_id
        now = int(1000 * time.time())
        client.log_batch(
            largest,
            [Metric(f"m{index % 500}", index, now, index // 500) for index in range(1000)],
            [Param(f"p{index}", "x" * 6000) for index in range(100)],
            [RunTag(f"t{index}", "y" * 8000) for index in range(100)],
        )
        data = client.get_run(largest).data
        assert (len(data.metrics), len(data.params)) == (500, 100)
        assert data.tags["t99"] == "y" * 8000
        with pytest.raises(mlflow.exceptions.MlflowException, match="0000"):
            client.get_run("0" * 32)
    finally:
        server.close()
