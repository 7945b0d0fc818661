"""Runs one part, whatever it raises, and keeps what it has seen."""

import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from scripts.first_hour.parts import Part
from scripts.first_hour.session import Machine, PartError, Session, UnseenError
from titan_moe.runtime.files import set_aside
from titan_moe.runtime.revision import code_in_words, running_code

VERDICTS = ("passed", "goals missed", "not seen", "failed")


@dataclass(frozen=True)
class Result:
    """The end of one part."""

    name: str
    question: str
    verdict: str
    """One of VERDICTS; "not seen": this machine cannot show it."""
    line: str
    seconds: float
    date: str
    code: str
    figures: dict[str, Any] = field(default_factory=dict)


def run_part(
    part: Part, machine: Machine, folder: Path, limit_s: float, log: Path | None = None
) -> Result:
    """Runs a part in a new folder; whatever it raises is its result, with what it had seen by then.
    The first node renames an existing folder: it may hold other files than this program's.

    Args:
        log: file that the output of its commands is added to; by default one in the folder.
    """
    if machine.node == 0 and folder.exists():
        set_aside(folder, f"{folder.name}.{{}}".format)
    folder.mkdir(parents=True, exist_ok=True)
    began, figures = time.monotonic(), {}
    session = Session(machine, folder, limit_s, log or _own_log(machine, folder))
    try:
        seen = part.run(session)
        verdict, line, figures = seen.verdict, seen.line, dict(seen.figures)
    except UnseenError as reason:
        verdict, line = "not seen", str(reason)
    except PartError as reason:
        verdict, line, figures = "failed", str(reason), session.evidence()
    except Exception as error:  # A mistake of this script costs the other parts nothing.
        verdict, line = "failed", f"{type(error).__name__}: {error}"
        with session.log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
    finally:  # Of an interrupt too.
        session.end()
    return Result(
        name=part.name,
        question=part.question,
        verdict=verdict,
        line=line,
        seconds=round(time.monotonic() - began, 1),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        code=code_of(machine),
        figures=figures,
    )


def _own_log(machine: Machine, folder: Path) -> Path:
    """Returns the file of a part's output. That of a node other than the first lies beside the
    folder, which the first one makes anew."""
    name = f"{folder.name}-node{machine.node}.txt"
    return folder.with_name(name) if machine.node else folder / "log.txt"


def code_of(machine: Machine) -> str:
    """Names the commit, a hash of the package's files, and the ranks."""
    code = code_in_words({**running_code(), "folder": "titan_moe"})
    return f"{code} on {machine.ranks} {machine.device} ranks"


def in_words(results: Sequence[Result], parts: int) -> str:
    counts = Counter(result.verdict for result in results)
    text = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    return f"{text}, of {parts} parts"
