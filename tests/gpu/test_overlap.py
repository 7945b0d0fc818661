"""Taking turns where autograd runs a backward in a thread of the device's."""

import pytest
import torch

from tests.support.turns import check_a_pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_forward_and_a_backward_take_turns_and_compute_what_they_do_alone():
    check_a_pair(torch.device("cuda", 0))
