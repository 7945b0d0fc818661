"""Run the Triton kernels on the CPU over all cases; needs TRITON_INTERPRET=1 from the start."""

import torch

from tests.support.place_cases import check
from titan_moe.ops import permute_indices, place_rows_triton


def main() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # Fills what a kernel forgets to write.
    for name in ("count_experts", "sort_by_expert", "count_copies", "place_copies"):
        setattr(permute_indices, f"{name}_reference", getattr(place_rows_triton, name))
    print(check())


if __name__ == "__main__":
    main()
