"""Scripts of Determined's Core API that nothing starts."""

import os
import subprocess
import sys
from pathlib import Path

from zerolab.contract.spec import ENV_MASTER, ENV_RUN_SPEC
from zerotrial.compat.determined import DIRECTORY

SCRIPT = """
from determined.experimental import core_v2
from determined.pytorch import deepspeed  # a module, not a name of the package

config = core_v2.Config(name="mine", hparams={"lr": 0.1}, external_trial_id="a")
core_v2.init(config=config)
try:
    from determined.pytorch import experimental
except ImportError as error:
    assert "instead: `zerolab.core.init()`" in str(error), error
start = 0
if core_v2.info.latest_checkpoint is not None:
    with core_v2.checkpoint.restore_path(core_v2.info.latest_checkpoint) as path:
        start = int((path / "state").read_text())
print(start, core_v2.info.trial.hparams, deepspeed.DeepSpeedTrial.__name__)
with core_v2.checkpoint.store_path({"steps_completed": start + 5}) as (path, _):
    (path / "state").write_text(str(start + 5))
core_v2.train.report_training_metrics(steps_completed=start + 5, metrics={"loss": 0.5})
core_v2.close()
with core_v2.init_context(config=core_v2.Config(name="other")) as context:
    assert context.train.latest_checkpoint is None
"""


def test_unmanaged_script_resumes_by_id(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {
        key: value for key, value in os.environ.items() if key not in {ENV_MASTER, ENV_RUN_SPEC}
    }
    environment["PYTHONPATH"] = str(DIRECTORY)
    for start in (0, 5):
        done = subprocess.run(
            [sys.executable, "script.py"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{start} {{'lr': 0.1}} ZeroTrial\n"
        assert "run `zerolab sync " in done.stderr
