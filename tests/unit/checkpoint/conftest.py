import pytest
import torch.distributed as dist


@pytest.fixture(scope="package", autouse=True)
def world_of_one():
    """A gloo world of this process alone, as a run on one process has."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
