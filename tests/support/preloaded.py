"""Modules that ranks of many tests import: the server that forks ranks imports them once."""

import datasets  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.pipelining
import torch.nn.attention.flex_attention  # noqa: F401

import tests.support.catching
import tests.support.resharding
import tests.support.saved_runs
import tests.support.tiny  # noqa: F401
import titan_moe.distributed.pipeline.schedule
import titan_moe.distributed.torch_mesh
import titan_moe.models.deepseek_v3.hf
import titan_moe.models.qwen3.hf  # noqa: F401
