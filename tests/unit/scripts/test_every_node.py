"""Several machines run what the first one starts: two loops over one store, and plain commands."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore

from scripts import every_node
from scripts.every_node import follow, lead, start
from tests.support.jobs import until
from tests.support.paths import REPO
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.process_pool import TIMEOUT_S
from titan_moe.verify.compare.launch import EVERY_NODE

_NOTE = 'echo "$NODE_RANK of $NNODES, $NGPU" > $NODE_RANK; '


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_node, "POLL_S", 0.01)
    monkeypatch.setattr(every_node, "_signals", [])


@contextmanager
def _second_node(store: HashStore) -> Iterator[list[int]]:
    """Lets machine 1 follow; the list gets its exit code."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(follow(store, 1)))
    thread.start()
    until(lambda: store.check(["beat/1"]), TIMEOUT_S)
    try:
        yield codes
    finally:
        if not store.check(["end"]):
            store.set("end", "0")
        thread.join()


@pytest.mark.parametrize("nodes", [1, 2])
def test_command_runs_on_as_many_machines_as_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    monkeypatch.chdir(tmp_path)
    store, variables = HashStore(), {"NNODES": str(nodes), "NGPU": "4"}
    with _second_node(store):
        for _ in range(2):
            assert start(store, ["bash", "-c", _NOTE], variables) == 0
    notes = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert notes == [f"{node} of {nodes}, 4\n" for node in range(nodes)]


def test_every_machine_has_the_plug_ins_of_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script in the place of Python says what a training's words give it."""
    monkeypatch.chdir(tmp_path)
    Path("python").write_text("#!/bin/sh\necho $PYTHONPATH > first")
    Path("python").chmod(0o700)
    monkeypatch.setattr("sys.executable", "./python")
    monkeypatch.setenv("PYTHONPATH", "/of/mine")
    monkeypatch.setattr(every_node, "MEET_S", 9)
    with _second_node(store := HashStore()):
        assert lead(store, ["bash", "-c", f"eval ${EVERY_NODE} true"], 2) == 0
    store = HashStore()
    monkeypatch.setattr(every_node, "TCPStore", lambda *_, **__: store)
    monkeypatch.setattr(every_node, "signal", Mock())
    words = ["--start", "2", "bash", "-c", "echo $PYTHONPATH > $NODE_RANK"]
    variables = {"NNODES": "2", "NODE_RANK": "0", "RDZV_ENDPOINT": "h:1", "PYTHONPATH": "a:/b"}
    with _second_node(store):
        assert every_node.main(words, variables) == 0
    found = [Path(name).read_text() for name in ("first", "0", "1")]
    assert found == [f"{REPO}:/of/mine\n", "a:/b\n", "a:/b\n"]


@pytest.mark.parametrize("fails", [0, 1])
def test_machine_that_fails_ends_the_other_with_one_line(fails: int) -> None:
    """The machine that does not fail would sleep for long."""
    store, command = HashStore(), ["bash", "-c", f"((NODE_RANK == {fails})) && exit 3; sleep 99"]
    seen = (
        pytest.raises(RunError, match="node 1 ended with exit code 3") if fails else nullcontext()
    )
    with _second_node(store), seen:
        assert start(store, command, {"NNODES": "2"}) == 3


def test_machine_that_comes_anew_fails_the_run_that_it_left() -> None:
    store = HashStore()
    store.add("started", 7)
    with _second_node(store):
        pass
    assert store.check(["7/exit/1"]) and store.get("7/exit/1") == b"1"


def test_all_machines_end_with_the_exit_code_of_the_first() -> None:
    store = HashStore()
    with _second_node(store) as codes:
        assert lead(store, ["bash", "-c", "exit 5"], 2) == 5
    assert codes == [5]


@pytest.mark.parametrize(("came", "limit"), [(True, "LOST_S"), (False, "MEET_S")])
def test_machine_without_a_sign_of_life_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, came: bool, limit: str
) -> None:
    monkeypatch.setattr(every_node, "LOST_S", 9)
    monkeypatch.setattr(every_node, limit, 0.3)
    store = HashStore()
    store.add("beat/1", int(came))
    store.add("left", 1)
    with pytest.raises(RunError, match="node 1 gave no sign of life for 0 s"):
        lead(store, ["sleep", "99"], 2)
    assert store.get("end") == b"1"
