"""Run the Triton kernels on the CPU over all cases; needs TRITON_INTERPRET=1 from the start."""

import torch

from tests.support.gated_cases import TOLERANCES, check
from titan_moe.ops import gated, gated_triton


def main() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # Fills what a kernel forgets to write.
    gated.gated_rows_reference = gated_triton.gated_rows
    gated.gated_rows_backward_reference = gated_triton.gated_rows_backward
    print(sum(check(dtype) for dtype in TOLERANCES))


if __name__ == "__main__":
    main()
