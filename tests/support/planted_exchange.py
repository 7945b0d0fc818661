"""Gives each expert the first matrix of another one at loading, past the comparison of checksums,
in a rank that torchrun started and that imports this module (job.imports)."""

from tests.support.planting import Bug, plant_in_ranks

plant_in_ranks(
    Bug(
        "titan_moe.checkpoint.load:Loader._load_found",
        "self._load_tensors(found.path, found.manifest, parts, base=not is_own)",
        "self._load_tensors(found.path, found.manifest, parts, base=not is_own), "
        "[local_part(t).copy_(local_part(t).flip(0)) for n, t in "
        "self.tensors.saved_model().items() if n.endswith('experts.w1')]",
    )
)
