"""Operations that collectives must not use on gloo."""

import torch

from titan_moe.runtime.ranks import run_on_ranks


def functional_gathers() -> list[str]:
    """Functional all-gathers of a gather of parts, on one rank of gloo."""
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from titan_moe.distributed.collectives import gather_parts

    seen = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Operations():
        gathered = gather_parts(torch.full((2,), dist.get_rank()), dist.group.WORLD)
    assert gathered.tolist() == [[0, 0], [1, 1]]
    return [name for name in seen if "all_gather_into_tensor" in name]


def test_gloo_gets_no_functional_all_gather():
    """16 of them in flight in a group of one end the process within seconds: gloo's two threads
    write the operation's name without a lock, and this one needs the heap."""
    assert run_on_ranks(functional_gathers, 2) == [[], []]
