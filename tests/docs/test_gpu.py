"""docs/contribute/gpu.md: its lines of code and its tests exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contribute" / "gpu.md"
ROW = re.compile(r"^\| `(\S+):(\d+)` \| `(.+?)` \| (.+) \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/\S+\.py)::(test_\w+)`")
MAX_DISTANCE = 10
"""Maximum distance in lines, so that most changes need not touch the page."""

USES_CUDA = re.compile(r"""torch\.cuda\.|type == "cuda"|"nccl"|pynvml|\["CUDA_VISIBLE_DEVICES"\]""")
"""Code that uses CUDA."""

NOT_LISTED = {
    "platform/zerolab/extensions/commands/doctor.py": "shows what it finds",
    "platform/zerolab/extensions/diagnosis.py": "names the call in a message",
    "trials/zerotrial/extensions/deepspeed_api/names/comm.py": "asks whether to take gloo instead",
    "trials/zerotrial/process/harness.py": "hands the answer to zerotrial.ranks",
    "trials/zerotrial/trainer.py": "hands the answer to zerotrial.ranks",
    "platform/zerolab/extensions/launcher_slurm/partition.py": "Slurm's slots, as its settings say",
}
"""Files that use CUDA but are covered by another file's line of the page."""


def rows() -> list[tuple[str, int, str, str]]:
    text = PAGE.read_text(encoding="utf-8")
    rows_found = ROW.findall(text)
    assert len(rows_found) == sum(line.startswith("| `") for line in text.splitlines())
    return [(file, int(line), code, tests) for file, line, code, _, tests in rows_found]


def test_code_is_near_its_line() -> None:
    moved = []
    for file, line, code, _ in rows():
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        matches = [number for number, text in enumerate(lines, 1) if code in text]
        if not any(abs(number - line) <= MAX_DISTANCE for number in matches):
            moved.append(f"{file}:{line}: {code!r} is at {matches or 'no line'}")
    assert not moved, "docs/contribute/gpu.md: correct these lines"


def test_tests_exist_and_need_a_gpu() -> None:
    tests_on_page = set(TEST.findall(PAGE.read_text(encoding="utf-8")))
    assert tests_on_page
    for file, test in tests_on_page:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), (file, test)
    for file, line, _, tests in rows():
        gpu_tests = TEST.findall(tests)
        assert gpu_tests or tests == "none", (file, line)
        for file_name, _ in gpu_tests:
            assert '"needs a GPU"' in (ROOT / file_name).read_text(encoding="utf-8")


def test_files_that_use_cuda_are_listed() -> None:
    listed = {file for file, *_ in rows()} | set(NOT_LISTED)
    using = set()
    for source in (*ROOT.glob("trials/**/*.py"), *ROOT.glob("platform/**/*.py")):
        if USES_CUDA.search(source.read_text(encoding="utf-8")):
            using.add(str(source.relative_to(ROOT)))
    assert using - listed == set(), (
        "docs/contribute/gpu.md: each needs a line there, or in NOT_LISTED here"
    )
    assert set(NOT_LISTED) - using == set()
