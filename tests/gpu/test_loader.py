"""Batches read by another process, pinned, and copied without waiting: the values of plain ones."""

import torch

from tests.support.documents import build_loader
from titan_moe.config.job_config import Training
from titan_moe.data.build import build_reader
from titan_moe.data.loader import Loader, ReaderProcess
from titan_moe.data.tokenizer import load_tokenizer


def test_pinned_batches_of_another_process_arrive_whole():
    section = Training(dataset="synthetic", seq_len=2048, local_batch_size=2, global_batch_size=8)
    device = torch.device("cuda", torch.cuda.current_device())
    reader = ReaderProcess(build_reader, section, "bytes", seed=0)
    loader = Loader(reader, prefetch_factor=2, pin_for=device)
    plain = build_loader(section, load_tokenizer("bytes"))
    for _ in range(20):
        # The device is busy, so copies wait while their memory may be given out again.
        torch.cuda._sleep(10_000_000)
        arrived = []
        for batch in loader.next_step():
            assert batch.tokens_BS.is_pinned() and batch.documents_BS.is_pinned()
            arrived.append(batch.tokens_BS.to(device, non_blocking=True))
            del batch
        for found, expected in zip(arrived, plain.next_step(), strict=True):
            assert torch.equal(found.cpu(), expected.tokens_BS)
    loader.close()
    plain.close()
