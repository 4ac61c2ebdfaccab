"""``zerolab init``: each template trains as it is written."""

import json
import os
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.installation import Installation, in_process
from zerolab.cli.local.init import TEMPLATES
from zerolab.config.validation import check_file


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_files_are_valid(tmp_path: Path, template: str) -> None:
    done = in_process(os.environ, "init", tmp_path / "new", "--template", template, "--json")
    written = json.loads(done.stdout)["files"]
    assert sorted(written) == sorted(map(str, (tmp_path / "new").iterdir()))
    for name in ("experiment.yaml", "search.yaml"):
        assert ": ok" in check_file(tmp_path / "new" / name)
    readme = (tmp_path / "new" / "README.md").read_text()
    assert f"zerolab run {tmp_path / 'new'}\n" in readme
    assert not any("PROJECT" in Path(file).read_text() for file in written)


def test_init_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text("mine")
    refused = in_process(os.environ, "init", tmp_path, expect=2).stderr
    assert f"DIR: {tmp_path / 'model_def.py'} exists already; use another directory" in refused
    assert (tmp_path / "model_def.py").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1
    refused = in_process(os.environ, "init", tmp_path / "model_def.py", expect=2).stderr
    assert "DIR: must be a directory, got the file" in refused
    refused = in_process(os.environ, "init", tmp_path / "a", "-t", "keras", expect=2).stderr
    assert (
        "--template: must be one of class, script, huggingface, accelerate, got 'keras'" in refused
    )


@pytest.mark.processes
@pytest.mark.slow
def test_templates_train(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    with Installation.running(tmp_path / "home") as installation:
        ids = {}
        for template in TEMPLATES:
            folder = tmp_path / template
            installation.quick("init", folder, "--template", template)
            shorter = yaml.safe_load((folder / "experiment.yaml").read_text())
            if template == "accelerate":  # a custom loop: --test does not shorten it
                shorter["entrypoint"] = "python train.py --epochs 1"
                (folder / "experiment.yaml").write_text(yaml.safe_dump(shorter))
            submitted = installation.quick("submit", folder, "--test")
            warned = "any other training loop runs in full" in submitted.stderr
            assert warned == (template != "class"), template
            ids[template] = submitted.stdout.strip()
        for template, experiment_id in ids.items():
            ended = installation.json("experiment", "wait", experiment_id)
            logs = installation.quick("logs", experiment_id, "--tail", "20").stdout
            assert ended["state"] == "COMPLETED", f"{template}: {logs}"
            described = installation.json("experiment", "describe", experiment_id)
            assert described["best_checkpoint"]["checkpoint"], template
            assert described["best_validation"] is not None, template
