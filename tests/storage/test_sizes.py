import pytest

from zerolab.contract.limits import ARCHIVE_BYTES
from zerolab.formatting import size_text
from zeroserver.settings import Limits


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (40_200_000, "40.2 MB"),
        (1.5e12, "1.5 TB"),
        (12_345_678e12, "12,345.7 PB"),
    ],
)
def test_size_text(size: float, text: str) -> None:
    assert size_text(size) == text


def test_server_and_client_agree_on_archive_size() -> None:
    assert Limits().archive_bytes == ARCHIVE_BYTES
