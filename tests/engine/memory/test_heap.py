"""Freed memory on a CPU is reused instead of returned to the system."""

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = textwrap.dedent("""
    import resource
    import torch
    from zerotrial.engine.memory.heap import keep_freed_memory

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            [torch.ones(1 << 20) for _ in range(24)]  # 96 MiB, all freed at once
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    torch.set_num_threads(1)
    faults()
    given_back = faults()
    print(keep_freed_memory(), end=" ")
    faults()
    print(faults() / max(given_back, 1))
""")


def _run(**environment: str) -> tuple[bool, float]:
    plain = {name: os.environ[name] for name in os.environ if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=plain | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    reused, share = done.stdout.split()
    return reused == "True", float(share)


@pytest.mark.slow
def test_freed_memory_is_reused() -> None:
    reused, share = _run()
    assert reused
    assert share < 0.05


@pytest.mark.slow
def test_user_settings_of_glibc_are_kept() -> None:
    reused, share = _run(MALLOC_TRIM_THRESHOLD_="1000000")
    assert not reused
    assert share > 0.5
