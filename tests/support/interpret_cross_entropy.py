"""Run the Triton kernels on the CPU over all cases; needs TRITON_INTERPRET=1 from the start."""

import torch

from tests.support.cross_entropy_cases import DTYPES, check
from titan_moe.ops import cross_entropy, cross_entropy_triton


def main() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # Fills what a kernel forgets to write.
    cross_entropy.cross_entropy_reference = cross_entropy_triton.cross_entropy
    cross_entropy.statistics_reference = lambda *arguments: cross_entropy.Statistics(
        *cross_entropy_triton.statistics(*arguments)
    )
    cross_entropy.gradient_in_place_reference = cross_entropy_triton.gradient_in_place
    print(sum(check(dtype) for dtype in DTYPES))


if __name__ == "__main__":
    main()
