"""Compares the logits of an exported folder's model here with those that transformers computes.

Both models run whole, in float32 on the CPU of this process. The folder has been compared with its
checkpoint. Experts whose scores nearly tie may be chosen otherwise by two right computations, so
tokens are drawn anew where they do.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from titan_moe.checkpoint.hf.read import load_alone
from titan_moe.runtime.errors import RunError, reason
from titan_moe.verify.parity.check import SMALLEST_MARGIN, distance, watch_margins
from titan_moe.verify.parity.oracle import FirstOfEqual

BOUND = 1e-4
"""Largest difference of a position's logits that counts as equal, relative to the norm of those
of transformers."""
_NUM_TOKENS = 16
_DRAWS = 20


def logits_difference(folder: Path) -> float:
    """Returns the largest difference of a position's logits on random tokens, relative to the norm
    of those of transformers.

    Raises RunError where transformers does not know the model.
    """
    ours = load_alone(folder, dtype=torch.float32, device=torch.device("cpu")).model
    try:
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
    except ValueError as error:
        why = reason(error).partition(". ")[0]
        raise RunError(f"{folder} is written, but transformers cannot open it: {why}") from None
    margins: list[float] = []
    watch_margins(ours, margins)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), FirstOfEqual():
        for _ in range(_DRAWS):
            margins.clear()
            tokens_BS = torch.randint(ours.config.vocab_size, (1, _NUM_TOKENS), generator=generator)
            logits_BSV = ours(tokens_BS)
            if min(margins, default=1.0) > SMALLEST_MARGIN:
                break
        rows = zip(logits_BSV[0], theirs.eval()(tokens_BS, use_cache=False).logits[0], strict=True)
        return max(distance(mine, other) for mine, other in rows)
