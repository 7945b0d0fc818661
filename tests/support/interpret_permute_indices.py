"""Run the Triton kernel on the CPU over all cases; needs TRITON_INTERPRET=1 from the start."""

import torch

from tests.support.permute_cases import ALIGNMENTS, cases, check
from titan_moe.ops import permute_indices, permute_indices_triton


def main() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # Fills what the kernel forgets to write.
    permute_indices.permute_indices_reference = permute_indices_triton.permute_indices
    num_checks = 0
    for row_alignment in ALIGNMENTS:
        for counts, unused in cases():
            check(counts, unused, row_alignment)
            num_checks += 1
    print(num_checks)


if __name__ == "__main__":
    main()
