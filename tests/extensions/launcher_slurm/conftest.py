from collections.abc import Iterator

import pytest

from tests.extensions.launcher_slurm.cluster import Cluster, cluster
from tests.server.conftest import postgresql

__all__ = ["postgresql", "slurm"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm of two nodes for the commands of this process."""
    with (
        cluster(tmp_path_factory.mktemp("slurm") / "cluster") as created,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", str(created.folder / "slurm.conf"))
        yield created
