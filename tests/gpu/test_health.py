"""The checks of machines on a GPU: a device in order is found so, and one wrong bit is found."""

import pytest
import torch

from titan_moe.health.probes import Operations, bytes_to_test, matmul, memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
_CUDA = torch.device("cuda", 0)


def test_products_are_exact_on_tensor_cores() -> None:
    assert matmul(_CUDA, Operations()).problem == ""


def test_one_wrong_bit_of_a_product_is_seen() -> None:
    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = torch.mm(a, b)
        product.view(torch.int16)[-1, -1] ^= 1
        return product

    assert matmul(_CUDA, Operations(multiply=multiply)).problem.endswith("products are wrong")


def test_most_of_the_memory_is_read_back() -> None:
    torch.cuda.empty_cache()
    num_bytes = bytes_to_test(_CUDA)
    assert num_bytes > 0.8 * torch.cuda.mem_get_info(_CUDA)[0]
    assert memory(_CUDA, Operations(), num_bytes).problem == ""
    torch.cuda.empty_cache()


def test_a_wrong_bit_of_the_memory_is_seen() -> None:
    def read(words: torch.Tensor) -> torch.Tensor:
        words[-1] ^= 1 << 62
        return words

    said = memory(_CUDA, Operations(read=read), 1 << 30).problem
    assert "bits 0x4000000000000000" in said
