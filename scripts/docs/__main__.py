"""Write what the program knows into docs/: keys, models, published speeds, torchtitan's keys.

    python -m scripts.docs            rewrite what is out of date
    python -m scripts.docs --check    name it instead: exit code 1

A page says where: what stands between `<!-- generated: NAME -->` and `<!-- end -->` is written by
REGIONS[NAME] of scripts/docs/generated.py.
"""

import argparse
import sys
from pathlib import Path

from scripts.docs.generated import outdated

REPO = Path(__file__).parents[2]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.docs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args(argv).check
    texts = outdated(REPO / "docs")
    for path, text in texts.items():
        print(path.relative_to(REPO), "is out of date" if check else "is rewritten")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if check and texts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
