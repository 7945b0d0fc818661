"""Builds meshes over process groups that exist already, which torch's DeviceMesh does not offer.

torch unflattens and slices the root mesh. Its own groups would be one per name of an axis; here a
mesh without groups is given those of `process_groups.py`. Every private name of DeviceMesh that the
package uses is in this module and in `tests/unit/distributed/test_torch_mesh.py`.
"""

from collections.abc import Mapping

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


class RootMesh:
    """All ranks of the world, of which every mesh is a part."""

    def __init__(self, device_type: str, num_ranks: int) -> None:
        ranks = torch.arange(num_ranks)
        self.mesh = DeviceMesh(device_type, ranks, mesh_dim_names=("world",), _init_backend=False)

    def submesh(
        self, view: Mapping[str, int], groups: Mapping[str, ProcessGroup], *, is_joined: bool
    ) -> DeviceMesh:
        """Returns some axes of the root unflattened into a view, with these groups.

        Args:
            view: the sizes of its axes, outermost first.
            groups: this rank's along each axis to keep, in the view's order.
            is_joined: lets torch use the one axis for those that it joins, as DeviceMesh._flatten
                does.
        """
        whole = self.mesh._unflatten(0, tuple(view.values()), tuple(view))
        whole._dim_group_names = []  # Slicing copies those that there are.
        mesh = whole[tuple(groups)]
        mesh._dim_group_names = [group.group_name for group in groups.values()]
        # torch.compile finds groups here.
        self.mesh._pg_registry.update({group.group_name: group for group in groups.values()})
        if is_joined:
            (name,) = groups
            self.mesh._flatten_mapping[name] = mesh
        return mesh
