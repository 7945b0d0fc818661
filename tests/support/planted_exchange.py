"""Gives each expert the first matrix of another one at loading, past the comparison of checksums,
in a rank that torchrun started and that imports this module (job.imports)."""

from tests.support.planting import Bug, plant_in_ranks

plant_in_ranks(
    Bug(
        "titan_moe.checkpoint.checkpointer:Checkpointer.load",
        'self._say("loaded %s%s", source, found.remark)',
        "[local_part(t).copy_(local_part(t).flip(0)) for n, t in "
        "self._tensors(with_optimizer=False).items() if n.endswith('experts.w1')]",
    )
)
