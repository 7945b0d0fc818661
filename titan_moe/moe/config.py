"""Dimensions and routing rules of a mixture-of-experts layer. No torch here: checks and planners
read it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from titan_moe.config.job_config import Score
from titan_moe.ops.activation import SWIGLU, Activation

_FEWEST_RANKS, _LEAST_SAVING = 8, 1.2


@dataclass(frozen=True)
class MoEConfig:
    """One family's MoE layer; names follow the published model cards."""

    num_experts: int
    top_k: int
    hidden_dim: int
    latent_dim: int | None = None
    """Channels of the rows that travel to experts and back: a map before dispatch makes them of the
    layer's input, and one after the sum its output. None: rows are as wide as the input."""
    num_shared_experts: int = 0
    shared_gate: bool = False
    """The shared experts' output is multiplied by a number per token, sigmoid(gate x)."""
    score: Score = "softmax"
    normalize_top_k: bool = False
    """Divide the chosen scores by their sum, so that a token's weights add up to route_scale."""
    route_scale: float = 1.0
    num_groups: int = 1
    """Equal groups of experts, of which a token may use top_groups (arXiv 2405.04434, 2.1.3)."""
    top_groups: int = 1
    group_score_top: int = 1
    """Number of a group's best scores whose sum is its score: 1 in DeepSeek-V2, 2 in V3."""
    table_rows: int = 0
    """Rows of a table that names the experts of each token id, whatever the scores; 0: scores
    select. `decoder.Block` sets it."""
    router_bias: bool = False
    """The router's logits have a bias (gpt-oss)."""
    stream_eps: float | None = None
    """Epsilon of the router's own norm: it reads the residual stream as it was before the experts'
    norm, and a learned number multiplies the weights of each expert (Gemma 4). None: the router
    reads what the experts read."""
    projection_bias: bool = False
    """The experts' projections have biases (gpt-oss)."""
    activation: Activation = SWIGLU
    """Activation of the routed experts; that of the shared ones is `ModelConfig.activation`."""
    weights_scale: Literal["outputs", "inputs"] = "outputs"
    """Tensor that a routing weight multiplies: an expert's output, or its input token (Llama 4)."""
    row_alignment: int = 1
    bias_update: Literal["sign", "quantile"] = "sign"
    bias_update_speed: float = 0.0
    bias_momentum: float = 0.0
    sequence_aux_loss_weight: float = 0.0
    global_aux_loss_weight: float = 0.0
    z_loss_weight: float = 0.0
    force_load_balance: bool = False

    @property
    def is_balanced(self) -> bool:
        """True if an auxiliary loss, bias updates or forced routing keep the experts' load even."""
        losses = self.sequence_aux_loss_weight or self.global_aux_loss_weight
        moves = self.bias_update_speed or self.bias_update == "quantile"
        return bool(moves or losses or self.force_load_balance)


class DispatchOptions(NamedTuple):
    """The dispatcher of the MoE layers, and its options."""

    name: str = "standard"
    """A key of `expert_parallel.DISPATCHERS`."""
    capacity_factor: float | None = None
    """Capacity factor of "capacity", which needs one, and of "symmetric", which may have one."""
    ranks_per_node: int | None = None
    """Number of ranks on a node, for "deduplicated"; None: all ranks are on one node."""
    num_chunks: int = 1
    """Value of `MoE.num_chunks`."""


def places_reached(top_k: int, places: int) -> float:
    """Returns how many of P places (ranks or nodes) a token's K random experts reach on average:
    P (1 - (1 - 1/P)^K). A deduplicating dispatcher sends one row of the token to each place, others
    one for each expert."""
    return places * (1 - (1 - 1 / places) ** top_k)


def deduplication_pays(top_k: int, places: int, ranks: int) -> bool:
    """Returns whether there are 8 ranks or more and one row per place is clearly fewer rows."""
    return ranks >= _FEWEST_RANKS and top_k / places_reached(top_k, places) >= _LEAST_SAVING


def rows_of_buffers(
    num_tokens: int, top_k: int, num_experts: int, ep: int, capacity_factor: float | None
) -> int:
    """Returns how many rows a rank's buffer in symmetric memory holds, from all ranks together.

    Args:
        capacity_factor: as a multiple of the num_tokens * top_k that a rank of a balanced router
            receives; never more than all rows that can come. None: room for all of them.
    """
    most = ep * num_tokens * min(top_k, num_experts // ep)
    share = num_tokens * top_k
    return most if capacity_factor is None else min(round(capacity_factor * share), most)
