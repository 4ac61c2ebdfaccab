"""The notebooks in docs/notebooks: each runs from start to end in a real kernel."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
MAX_BYTES = 100_000


def outputs(cells: list[Any]) -> list[Any]:
    return [output for cell in cells for output in cell.get("outputs", [])]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_notebook_has_outputs(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    cells = json.loads(text)["cells"]
    assert cells[0]["source"][0].startswith("# ")
    assert outputs(cells)
    assert all(cell["execution_count"] for cell in cells if cell["cell_type"] == "code")
    assert {output["output_type"] for output in outputs(cells)} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    assert "stderr" not in {output.get("name") for output in outputs(cells)}
    assert len(text) < MAX_BYTES
    assert "/tmp" not in text
    assert "/home" not in text


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat")
    for variable in ("ZEROLAB_MASTER", "ZEROLAB_TOKEN", "ZEROLAB_RUN_SPEC"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("ZEROLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = outputs(notebook.cells)
    assert "stderr" not in {output.get("name") for output in shown}
    if "zerotrial.Trainer" in path.read_text(encoding="utf-8"):
        (bar, *_) = [o.data["text/html"] for o in shown if "text/html" in o.get("data", {})]
        assert '<progress value="115" max="115">' in bar
