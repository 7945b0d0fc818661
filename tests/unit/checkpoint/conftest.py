import pytest
import torch.distributed as dist

from tests.support.saved_runs import Run


@pytest.fixture(scope="package", autouse=True)
def world_of_one():
    """A gloo world of this process alone, as a run on one process has."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "outputs"


@pytest.fixture
def saved(folder):
    """The folder of a run that saved steps 1 and 2."""
    run = Run(folder)
    run.save(1)
    run.save(2)
    return folder
