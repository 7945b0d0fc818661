"""Random state and determinism, set once at start."""

import os
import random

import numpy as np
import torch

from titan_moe.config.job_config import Debug


def seed_everything(debug: Debug) -> None:
    """Seed the generators of Python, NumPy and torch, alike on every rank.

    Initial weights and data order do not depend on this state: they draw from generators of their
    own. With `debug.deterministic` torch raises (or warns) where it has no deterministic kernel.
    """
    random.seed(debug.seed)
    np.random.seed(debug.seed % 2**32)
    torch.manual_seed(debug.seed)
    if not debug.deterministic:
        return
    # cuBLAS reads it when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)
