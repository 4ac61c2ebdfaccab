"""A new searcher is one file and one line: ``toy_searcher.py`` is the whole implementation."""

import subprocess
import sys
from pathlib import Path

import pytest

REGISTER = """
from zerolab.searcher.registry import SEARCHERS
from tests.searcher.toy_searcher import ToyConfig
SEARCHERS["toy"] = ToyConfig  # the one line
"""

CONFIGURE = """
from zerolab.config import load_experiment
from tools.key_tables import TABLES
from zerolab.errors import ConfigError
from zerolab.searcher import make_searcher

block = {"name": "toy", "metric": "loss", "max_length": 10, "goal": 0.5}
config = load_experiment({"entrypoint": "m:T", "searcher": block})
assert config.searcher.goal == 0.5
assert load_experiment(config.to_dict()) == config
assert "`searcher.goal`" in TABLES["experiment fields"]()
(first,) = make_searcher(config.searcher, {}, 0).initial_operations()
for wrong in ({"goal": "x"}, {"goall": 1}):
    try:
        load_experiment({"entrypoint": "m:T", "searcher": block | wrong})
    except ConfigError as error:
        print(error)
try:
    load_experiment({"entrypoint": "m:T", "searcher": {**block, "name": "single"}})
except ConfigError as error:
    print(error)
"""

SERVE = """
import sys
from pathlib import Path
from tests.server.helpers import serve, validation

with serve(Path(sys.argv[1])) as server:
    block = {"name": "toy", "metric": "loss", "max_length": 10, "goal": 0.5}
    server.add_agent()
    server.submit(searcher=block)
    for loss in (0.9, 0.4):
        (item,) = server.work()
        server.post(f"/runs/{item.run_id}/started", {})
        server.send(item.run_id, 1, [validation(10, loss)])
        server.exit(item.run_id, 0)
    print(server.experiment()["state"], [trial["state"] for trial in server.trials()])
"""


def run(code: str, *arguments: str) -> str:
    """Run code in a separate process in which the toy is registered."""
    done = subprocess.run(
        [sys.executable, "-c", REGISTER + code, *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_registered_searcher_is_validated_and_documented() -> None:
    output = run(CONFIGURE)
    assert "searcher.goal: must be a number, got 'x'" in output
    assert "searcher.goall: unknown key; did you mean 'goal'?" in output
    assert (
        "searcher.goal: does not belong to the single searcher, got 0.5; "
        "remove it or set searcher.name to toy"
    ) in output


@pytest.mark.processes
def test_server_runs_registered_searcher(tmp_path: Path) -> None:
    assert run(SERVE, str(tmp_path)).strip() == "COMPLETED ['COMPLETED', 'COMPLETED']"
