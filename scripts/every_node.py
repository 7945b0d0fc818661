"""Run a command on the first of several machines, and let it start others on all of them.

    python scripts/every_node.py COMMAND...

On each machine, with NNODES, NODE_RANK and RDZV_ENDPOINT as run_train.sh takes them. Machine 0 runs
COMMAND. It finds in TITAN_MOE_EVERY_NODE the words that run what follows them on the first NNODES
machines, as srun does under Slurm. All machines end with COMMAND's exit code.

Machine 0 keeps a torch TCPStore one port above RDZV_ENDPOINT's. The others ask it twice a second
what to run. A shared folder would need no port, but NFS may show a new file only after a minute,
and a folder does not tell that a machine has gone. A connection does, because it ends.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError, Store, TCPStore

from titan_moe.runtime.errors import RunError, print_errors
from titan_moe.runtime.launch import end_with_parent
from titan_moe.verify.compare.launch import EVERY_NODE

POLL_S = 0.5
LOST_S = 60.0
"""Seconds without a sign of life after which a machine counts as lost."""
MEET_S = 1800.0
"""Seconds until all machines must have come; one may load an image that the others have."""
_REPO = Path(__file__).resolve().parents[1]
_signals: list[int] = []


def lead(store: Store, words: Sequence[str], nodes: int) -> int:
    """Run a command once all machines have come; returns its exit code, which the others get too.

    Raises RunError if a machine does not come, or goes.
    """
    # The command's PYTHONPATH leads to its plug-ins.
    shell = f'PYTHONPATH={shlex.quote(str(_REPO))}:${{PYTHONPATH:-}} exec "$0" "$@"'
    start = ["sh", "-c", shell, sys.executable, __file__, "--start", str(nodes)]
    beats = dict.fromkeys(range(1, nodes), (0, time.monotonic()))
    code, process = 1, None
    try:
        while process is None or process.poll() is None:
            _watch(store, beats, MEET_S if process is None else LOST_S)
            if _signals and process is None:
                code = 128 + _signals[0]
                return code
            if process is None and all(beat for beat, _ in beats.values()):
                process = _begin(words, {EVERY_NODE: shlex.join(start)})
            if _signals and process is not None:
                process.send_signal(_signals.pop())
            time.sleep(POLL_S)
        code = _exit_code(process)
    finally:
        if process is not None:
            process.terminate()
            process.wait()
        store.set("end", str(code))
        until = time.monotonic() + LOST_S
        while store.add("left", 0) < nodes - 1 and time.monotonic() < until:
            time.sleep(POLL_S)
    return code


def _watch(store: Store, beats: dict[int, tuple[int, float]], limit_s: float) -> None:
    """Notes each machine's signs of life; raises RunError if one gave none for `limit_s`."""
    now = time.monotonic()
    for node, (beat, since) in beats.items():
        if (latest := store.add(f"beat/{node}", 0)) != beat:
            beats[node] = latest, now
        elif now - since > limit_s:
            raise RunError(f"node {node} gave no sign of life for {limit_s:.0f} s: see its output")


def follow(store: Store, node: int) -> int:
    """Run this machine's part of all that machine 0 starts; returns the exit code of its command.

    Raises DistError if machine 0 has gone.
    """
    number = store.add("started", 0)
    store.set(f"{number}/exit/{node}", "1")  # After a restart: this machine has left that run.
    while not (_signals or store.check(["end"])):
        store.add(f"beat/{node}", 1)
        if store.add("started", 0) == number:
            time.sleep(POLL_S)
            continue
        number += 1
        words, variables, folder = json.loads(store.get(f"{number}/job"))
        if node < int(variables["NNODES"]):
            process = _begin(words, {**variables, "NODE_RANK": str(node)}, folder)
            while process.poll() is None:
                store.add(f"beat/{node}", 1)
                if _signals or store.check([f"{number}/over"]):
                    process.terminate()
                time.sleep(POLL_S)
            store.set(f"{number}/exit/{node}", str(_exit_code(process)))
    if _signals:
        return 128 + _signals[0]
    store.add("left", 1)
    return int(store.get("end"))


def start(store: Store, words: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a command on the first NNODES machines; returns the exit code of this one.

    All are ended if one fails, or if this process gets a signal.

    Raises RunError if another machine fails first.
    """
    number = store.add("started", 0) + 1
    store.set(f"{number}/job", json.dumps([words, variables, os.getcwd()]))
    store.add("started", 1)
    process = _begin(words, {**variables, "NODE_RANK": "0"})
    running, problem = set(range(1, int(variables["NNODES"]))), ""
    ended = time.monotonic()
    while process.poll() is None or (running and time.monotonic() - ended < 2 * LOST_S):
        for node in [node for node in running if store.check([f"{number}/exit/{node}"])]:
            running.remove(node)
            code = int(store.get(f"{number}/exit/{node}"))
            if code and not (problem or process.poll()):
                problem = f"node {node} ended with exit code {code}: its own output says why"
        if problem or _signals:
            process.terminate()
        if process.poll() is None:
            ended = time.monotonic()
        elif process.returncode or time.monotonic() - ended > LOST_S:
            store.set(f"{number}/over", "")
        time.sleep(POLL_S)
    if running and not process.returncode:
        problem = f"node {min(running)} did not end with the others: see its own output"
    if problem:
        raise RunError(problem)
    return _exit_code(process)


def _begin(
    words: Sequence[str], variables: Mapping[str, str], folder: str | None = None
) -> subprocess.Popen[bytes]:
    """Starts a process that ends with this one, and gets no signals from the terminal."""
    environment, prepare = os.environ | variables, end_with_parent
    return subprocess.Popen(
        words, cwd=folder, env=environment, start_new_session=True, preexec_fn=prepare
    )


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    code = process.wait()
    return code if code >= 0 else 128 - code


def main(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs this machine's part; returns the exit code."""
    nodes, node = int(environment["NNODES"]), int(environment["NODE_RANK"])
    host, _, port = environment["RDZV_ENDPOINT"].rpartition(":")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: _signals.append(number))
    is_job = words[0] == "--start"
    here, limit = (host, int(port) + 1), timedelta(seconds=MEET_S)
    try:
        hosts = node == 0 and not is_job
        store = TCPStore(*here, is_master=hosts, wait_for_workers=False, timeout=limit)
        if not is_job:
            return follow(store, node) if node else lead(store, words, nodes)
        if nodes > int(words[1]):
            raise RunError(f"this needs {nodes} nodes, and there are {words[1]}")
        # PATH leads to the environment, PYTHONPATH to plug-ins; run_train.sh puts its code before.
        kept = {"NGPU", "NNODES", "PATH", "PYTHONPATH"}
        return start(store, words[2:], {key: environment[key] for key in kept & environment.keys()})
    except DistError as error:
        reason = str(error).splitlines()[0]
        print_errors([f"node 0 cannot be reached at {here[0]}:{here[1]}, or has gone: {reason}"])
    except RunError as error:
        print_errors([str(error)])
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
