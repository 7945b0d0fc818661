"""What a checkpoint's metadata may ask for."""

import io
import pickle

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from titan_moe.checkpoint.safe_reader import _AllowListUnpickler


class _Attribute:
    """Pickled as Python 3.11.2 pickles the member of an enumeration."""

    def __init__(self, of, name):
        self.of, self.name = of, name

    def __reduce__(self):
        return getattr, (self.of, self.name)


def test_an_enumeration_as_python_3_11_2_writes_it():
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    raw = pickle.dumps(_Attribute(_MEM_FORMAT_ENCODING, member.name))
    assert _AllowListUnpickler(io.BytesIO(raw)).load() is member
    with pytest.raises(pickle.UnpicklingError, match=r"getattr of .*, which no checkpoint needs"):
        _AllowListUnpickler(io.BytesIO(pickle.dumps(_Attribute(Metadata, "__init__")))).load()
