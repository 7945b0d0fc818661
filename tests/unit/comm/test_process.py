"""Process group, device, seeds, garbage, log."""

import logging
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import restore_flash_attention_impl
from torch.nn.attention._registry import _FLASH_ATTENTION_IMPLS

from tests.support.commands import undone
from titan_moe.comm import process as process_module
from titan_moe.comm.process import _store, process_group, seed_everything
from titan_moe.config.job_config import Comm, Debug
from titan_moe.runtime import device as device_module
from titan_moe.runtime import host_gloo
from titan_moe.runtime.device import (
    backend_for,
    describe_device,
    pick_device,
    use_flash_attention_3,
)
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.gpus import gpu_of
from titan_moe.runtime.launch import Launch
from titan_moe.runtime.log import start_logging

_ALONE = """
import datetime, os, torch, torch.distributed as dist
from titan_moe.config.job_config import Comm
from titan_moe.runtime.launch import Launch
from titan_moe.comm.process import process_group, set_timeouts
with process_group(Launch.from_environment(os.environ), Comm(), os.environ) as process:
    assert process.is_main and dist.get_world_size() == process.world_size == 1
    backend = dist.group.WORLD._get_backend(process.device)
    assert backend.options._timeout == datetime.timedelta(seconds=330)
    set_timeouts(7, [None])
    assert backend.options._timeout == datetime.timedelta(seconds=37)
    tensor = torch.ones(2, device=process.device)
    dist.all_reduce(tensor)
    del backend  # Left to the interpreter's end, gloo's threads abort it one time in fifty.
assert not dist.is_initialized()
"""


def test_plain_process_forms_a_process_group_of_one() -> None:
    subprocess.run([sys.executable, "-c", _ALONE], check=True)


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Lets `process_group` make a group of two GPUs that are not there; returns what makes it."""
    made, options = mock.Mock(), mock.Mock(Options=mock.Mock())
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "init_process_group", made)
    monkeypatch.setattr(dist, "destroy_process_group", mock.Mock())
    monkeypatch.setattr(torch.cuda, "set_device", mock.Mock())
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", mock.Mock())
    monkeypatch.setattr(process_module, "use_flash_attention_3", mock.Mock())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return made


@pytest.mark.parametrize(
    ("deterministic", "own", "chosen"),
    [(True, None, "^NVLS,NVLSTree"), (True, "Ring", "Ring"), (False, None, None)],
)
def test_deterministic_nccl_excludes_sums_in_nvlink_switches(
    monkeypatch, caplog, join: mock.Mock, deterministic: bool, own: str | None, chosen: str | None
) -> None:
    monkeypatch.setenv("NCCL_ALGO", own or "")  # So that it is as it was after the test.
    if own is None:
        monkeypatch.delenv("NCCL_ALGO")
    found = []
    join.side_effect = lambda *_, **__: found.append(os.environ.get("NCCL_ALGO"))
    caplog.set_level(logging.INFO)
    with process_group(Launch(), Comm(), {}, deterministic=deterministic):
        assert found == [chosen] and join.call_args.kwargs["device_id"] is None
    assert ("NCCL_ALGO" in caplog.text) == (own != chosen)


@pytest.mark.parametrize("ranks, backend", [(2, "cuda:nccl,cpu:gloo"), (5, host_gloo.BACKEND)])
def test_ranks_share_gpus_where_there_are_fewer(
    monkeypatch: pytest.MonkeyPatch, join: mock.Mock, ranks: int, backend: str
) -> None:
    share = mock.Mock()
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", share)
    launch = Launch(local_rank=ranks - 1, local_world_size=ranks)
    comm = Comm(parameter_sms=16, share_gpus=True, split_communicators=True)
    with process_group(launch, comm, {}) as process:
        torch._C._set_sm_carveout_experimental.assert_called_once_with(16)  # type: ignore[attr-defined]
    assert process.device == torch.device("cuda", (ranks - 1) % 2)
    assert join.call_args.args == (backend,)
    options, bound = (join.call_args.kwargs[key] for key in ("pg_options", "device_id"))
    if backend == host_gloo.BACKEND:
        assert options is bound is None
        share.assert_called_once_with(1 / 3, process.device)
    else:
        assert options.config.max_ctas == 16 and bound == process.device
        share.assert_not_called()


def test_process_group_names_a_rank_that_cannot_join() -> None:
    environment = {"MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
    with (
        pytest.raises(RunError, match="rank 1 cannot join the process group"),
        process_group(Launch(rank=1, world_size=2), Comm(), environment),
    ):
        pass
    assert not dist.is_initialized()


def test_restarted_ranks_see_no_keys_of_the_attempt_before(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    place |= {"MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    first, second = (
        _store(Launch(world_size=2), timedelta(seconds=9), {"TORCHELASTIC_RESTART_COUNT": count})
        for count in "01"
    )
    first.set("address", "gone")
    assert first.check(["address"]) and not second.check(["address"])


def test_store_of_one_machine_is_a_file_of_the_attempt(tmp_path: Path) -> None:
    launch = Launch(world_size=2, local_world_size=2)
    folder = {"TITAN_MOE_ATTEMPTS": str(tmp_path)}
    stores = [
        _store(launch, timedelta(seconds=9), folder | {"TORCHELASTIC_RESTART_COUNT": attempt})
        for attempt in "001"
    ]
    stores[0].set("address", "here")
    assert [store.check(["address"]) for store in stores] == [True, True, False]
    with pytest.raises(RuntimeError):
        stores[0].wait(["nothing"], timedelta(seconds=0.1))


@pytest.mark.parametrize(
    ("major", "installed", "capability"),
    [(9, True, "9.0 with FA3"), (9, False, "9.0"), (8, True, "8.0")],
)
def test_flash_attention_3_is_used_if_installed_on_capability_9(
    monkeypatch: pytest.MonkeyPatch, major: int, installed: bool, capability: str
) -> None:
    gpu, handle = torch.device("cuda"), SimpleNamespace(remove=lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(device_module, "find_spec", lambda name: installed or None)
    monkeypatch.setitem(_FLASH_ATTENTION_IMPLS, "FA3", lambda: handle)
    use_flash_attention_3(gpu)
    described = describe_device(gpu)
    restore_flash_attention_impl(_raise_warn=False)
    assert described == {"device": "NVIDIA H100", "capability": capability}


@pytest.mark.usefixtures("join")
def test_pick_device_refuses_more_ranks_than_gpus() -> None:
    device = pick_device(Launch(rank=1, world_size=2, local_rank=1, local_world_size=2))
    assert device == torch.device("cuda", 1) and "nccl" in backend_for(device)
    line = r"4 ranks for 2 GPUs: start with NGPU=2, with --comm\.share_gpus"
    with pytest.raises(RunError, match=line):
        pick_device(Launch(local_world_size=4))


def test_pick_device_refuses_gpus_that_cuda_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RunError, match=r"2 GPUs found, but torch 2\S+ has no CUDA: install torch"):
        pick_device(Launch(), 2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device_module, "_DRIVER", tmp_path / "version")
    with pytest.raises(RunError, match=r"8 GPUs found, .* driver of unknown version: install"):
        pick_device(Launch(), 8)
    (tmp_path / "version").write_text("535.104.05\n")
    with pytest.raises(RunError, match=r"driver 535\.104\.05: .* CUDA_VISIBLE_DEVICES= to use"):
        pick_device(Launch(), 1)
    assert pick_device(Launch(), 0) == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GB200", 2500e12),
        ("Some future GPU", None),
    ],
)
def test_peak_flops_are_known_by_the_name_of_a_gpu(name: str, flops: float | None) -> None:
    gpu = gpu_of(name)
    assert (gpu and gpu.flops) == flops


def test_seed_everything_repeats_all_generators(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    draws = []
    for _ in range(2):
        seed_everything(Debug(seed=2**40 + 1))
        draws.append((torch.rand(1).item(), float(np.random.rand())))
    assert draws[0] == draws[1]
    assert not torch.are_deterministic_algorithms_enabled()
    seed_everything(Debug(deterministic=True, deterministic_warn_only=True))
    assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_start_logging_prints_for_chosen_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    with undone():
        for rank in range(3):
            start_logging(rank, {0, 2})
            logging.getLogger("titan_moe.training.trainer").info("from %d", rank)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == ["rank 0 from 0", "rank 2 from 2"]
