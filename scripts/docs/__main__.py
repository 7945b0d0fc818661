"""Write what the program knows into docs/: keys, models, published speeds, torchtitan's keys.

    python -m scripts.docs            rewrite what is out of date
    python -m scripts.docs --check    name it instead: exit code 1

What stands in a page between `<!-- generated: NAME -->` and `<!-- end -->` is written by
REGIONS[NAME].
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.bench import memory_rows, plan_on_cpu
from scripts.docs import commands, configuration, forms, models, published, torchtitan

REPO = Path(__file__).parents[2]
_WRITER = REPO / "tests" / "foreign" / "write_step.py"
REGIONS: dict[str, Callable[[], str | None]] = {
    "commands": commands.sections,
    "configuration": configuration.tables,
    "forms": forms.table,
    "memory rows": memory_rows.table,
    "models": models.tables,
    "plan on a CPU": plan_on_cpu.table,
    "published": published.table,
    "torchtitan": torchtitan.table,
    "torchtitan metrics": torchtitan.metrics,
    "write_step": lambda: f"```python\n{_WRITER.read_text(encoding='utf-8')}```",
}
"""The text of a region, by its name in the page; None leaves it as it is."""
_REGION = re.compile(r"(<!-- generated: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.docs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="change nothing")
    check, is_outdated = parser.parse_args(argv).check, False
    for path in sorted((REPO / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (new := filled(text, REGIONS)) != text:
            is_outdated = True
            print(path.relative_to(REPO), "is out of date" if check else "is rewritten")
            if not check:
                path.write_text(new, encoding="utf-8")
    return 1 if check and is_outdated else 0


def filled(text: str, regions: Mapping[str, Callable[[], str | None]]) -> str:
    """Returns a page with its regions written anew.

    KeyError names a region that nothing generates; ValueError: a region has no end.
    """
    if text.count("<!-- generated: ") != len(_REGION.findall(text)):
        raise ValueError("a '<!-- generated: NAME -->' without an end")

    def replace(region: re.Match[str]) -> str:
        opening, name, _, end = region.groups()
        new = regions[name]()
        return region[0] if new is None else f"{opening}\n{new.strip(chr(10))}\n\n{end}"

    return _REGION.sub(replace, text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
