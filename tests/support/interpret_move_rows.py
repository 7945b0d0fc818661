"""Run the Triton kernels on the CPU over all cases; needs TRITON_INTERPRET=1 from the start."""

import torch

from tests.support.move_rows_cases import DTYPES, check
from titan_moe.ops import move_rows, move_rows_triton


def main() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # Fills what a kernel forgets to write.
    move_rows.copy_rows_reference = move_rows_triton.copy_rows
    move_rows.add_rows_reference = move_rows_triton.add_rows
    print(sum(check(dtype) for dtype in DTYPES))


if __name__ == "__main__":
    main()
