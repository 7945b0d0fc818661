"""OLMo-core 3.0.0 on a CPU: prints the line that stops its MoE layer; none is handed in.

python olmo_step.py OUT MODELS
"""

import sys
from pathlib import Path

import tiny
import torch


def forward(out):
    from olmo_core.nn.moe import MoEConfig, MoERouterConfig, MoEType

    router = MoERouterConfig(top_k=2)
    config = MoEConfig(name=MoEType.dropless, num_experts=8, hidden_size=16, router=router)
    layer = config.build(d_model=32, init_device="cpu", n_layers=2)
    layer(torch.randn(2, tiny.LENGTH, 32)).sum().backward()


def main():
    folders = list(tiny.run_cases(Path(sys.argv[1]), [("dropless", "", forward)]))
    print(*tiny.place_of_error(Path(sys.argv[1], "dropless/log.0")) if not folders else ["runs"])


if __name__ == "__main__":
    main()
