"""A rank that only starts: the part of the first step that both programs pay.

Rank 0 prints `torch` once torch is imported and gloo's process group is there, `fsdp` once what
FSDP2 and torch.optim import themselves with their first parameter is imported too, and
`memory MIB`, its resident set with torch alone.
"""

import os

import torch.distributed as dist

from scripts.bench.resident import resident_mib


def main() -> None:
    after_import = resident_mib(os.getpid())["VmRSS"]
    dist.init_process_group("gloo")
    _print("torch")
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    _print("fsdp")
    _print(f"memory {after_import:.1f}")
    dist.destroy_process_group()


def _print(word: str) -> None:
    if dist.get_rank() == 0:
        print(word, flush=True)


if __name__ == "__main__":
    main()
