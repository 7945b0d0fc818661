"""Do other ways to multiply by the router's weights select the same experts?

    python -m scripts.bench.router_flips                        # a million tokens of each family
    python -m scripts.bench.router_flips --tokens 100000 --families qwen3/30B-A3B

Tokens are drawn from a normal distribution, in bfloat16, and weights as a model begins with them.
Counted are tokens of which any expert differs from those that float32 products select:

    order       bfloat16 weights, float32 products summed in blocks of 64: what one pass of
                bfloat16 units does, and any other float32 kernel
    three       float32 weights as three bfloat16 parts each, float32 sums
    two, one    the same without the smaller parts
"""

import argparse
from dataclasses import replace

import torch
from torch import Tensor

from scripts.bench.measure import print_table
from titan_moe.models.registry import model_config
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.router import Router
from titan_moe.ops.split_linear import parts

FAMILIES = ["qwen3/30B-A3B", "gpt_oss/120b", "mixtral/8x7B", "deepseek_v3/671B"]
WAYS = ["order", "three", "two", "one"]
_TOGETHER, _BLOCK = 4096, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.families:
        config = model_config(*name.split("/"))
        assert config.moe is not None
        counts = flips(config.dim, config.moe, arguments.tokens)
        sizes = [str(x) for x in (config.dim, config.moe.num_experts, config.moe.top_k)]
        rows.append([name, *sizes, *(str(counts[way]) for way in WAYS)])
        print_table(["", "D", "E", "K", *WAYS], rows)


def flips(dim: int, config: MoEConfig, num_tokens: int, seed: int = 0) -> dict[str, int]:
    """Tokens that go elsewhere, by way."""
    torch.manual_seed(seed)
    router = Router(dim, replace(config, router_bias=False))
    w_DE = (torch.randn(config.num_experts, dim) * 0.02).t().contiguous()
    pieces = [part.float() for part in parts(w_DE)]
    found = dict.fromkeys(WAYS, 0)
    for start in range(0, num_tokens, _TOGETHER):
        x_TD = torch.randn(min(_TOGETHER, num_tokens - start), dim).bfloat16().float()
        narrow, wide = _selected(router, x_TD @ pieces[0]), _selected(router, x_TD @ w_DE)
        blocks = zip(x_TD.split(_BLOCK, 1), pieces[0].split(_BLOCK), strict=True)
        in_blocks = sum((x @ w for x, w in blocks), torch.zeros(()))
        found["order"] += _differ(_selected(router, in_blocks), narrow)
        found["one"] += _differ(narrow, wide)
        two = x_TD @ pieces[1] + x_TD @ pieces[0]
        found["two"] += _differ(_selected(router, two), wide)
        three = x_TD @ pieces[2] + x_TD @ pieces[1] + x_TD @ pieces[0]
        found["three"] += _differ(_selected(router, three), wide)
    return found


def _selected(router: Router, logits_TE: Tensor) -> Tensor:
    softmax = router.config.score == "softmax"
    scores_TE = logits_TE.softmax(-1) if softmax else logits_TE.sigmoid()
    return router.select_experts(scores_TE).sort(-1).values


def _differ(ours_TK: Tensor, theirs_TK: Tensor) -> int:
    return int((ours_TK != theirs_TK).any(-1).sum())


if __name__ == "__main__":
    main()
