"""What the rehearsal says of kernels that torch's compiler makes; they are made by hand here."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scripts.rehearsal import inductor
from scripts.rehearsal.inductor import LARGE_SPILL, kernels_of
from scripts.rehearsal.places import Place
from scripts.rehearsal.sm90 import Taken

_PLACE = Place("ops/attention.py:attend")
_FITS = Taken("fits", registers=40, spilled_bytes=0, shared_bytes=2048)
_SPILLS = Taken("spills", registers=255, spilled_bytes=LARGE_SPILL, shared_bytes=0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Taken]:
    """What a stand-in for the compiler makes."""
    to_make: list[Taken] = []

    @contextmanager
    def compiler(kernels: list[Taken]) -> Iterator[None]:
        kernels += to_make
        yield

    monkeypatch.setattr(inductor, "_for_sm90", compiler)
    return to_make


def test_a_spill_is_told_and_a_large_one_is_found(made: list[Taken]):
    made += [_FITS, _SPILLS]
    told = kernels_of(lambda: None, _PLACE)
    assert told.findings == []
    assert told.in_words() == [
        "2 kernels, 1 spill; at most 255 registers and 2,048 bytes of shared memory",
        "  spills spills 4,080 bytes at 255 registers",
    ]
    made.append(_SPILLS._replace(spilled_bytes=LARGE_SPILL + 4))
    [finding] = kernels_of(lambda: None, _PLACE).findings
    assert (finding.kind, finding.place) == ("spills", _PLACE)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (
            "No valid triton configs. OutOfResources: shared memory, 300000 of 232448",
            "does not fit",
        ),
        ("a graph that cannot be lowered", "refused"),
    ],
)
def test_what_the_compiler_refuses_is_found(made: list[Taken], said: str, kind: str):
    def run() -> None:
        raise RuntimeError(f"backend='inductor' raised:\n{said}")

    [finding] = kernels_of(run, _PLACE).findings
    assert finding.kind == kind
