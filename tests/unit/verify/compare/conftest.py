"""A launcher whose runs take no time."""

from pathlib import Path

import pytest

from tests.support.stub_runs import CAPABILITY, STUB, Stubbed
from titan_moe.runtime.revision import files_hash


@pytest.fixture
def launcher(tmp_path: Path) -> Stubbed:
    """The code of its runs is the stub."""
    code = tmp_path / "code"
    code.mkdir()
    sha256 = files_hash(code / "titan_moe")
    text = STUB.replace("CAPABILITY", repr(CAPABILITY)).replace("SHA256", repr(sha256))
    (code / "run_train.sh").write_text(text)
    (code / "run_train.sh").chmod(0o755)
    return Stubbed(tmp_path / "out")
