"""Write the goldens anew, all or those of some kinds and names: python tests/goldens/make.py [KIND[/NAME] ...]

Only where an answer changes on purpose; the difference is for the reviewer, and CHANGED.md says why.
"""

import sys
from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "train")]


def main(patterns):
    """Write the files whose name one of the patterns matches."""
    from goldens.answers import HERE, KINDS, dumped

    for kind, documents in KINDS.items():
        for name, answer in documents():
            if any(fnmatch(f"{kind}/{name}", f"{pattern}*") for pattern in patterns):
                file = HERE / kind / f"{name}.json"
                file.parent.mkdir(exist_ok=True)
                file.write_text(dumped(answer()) + "\n", encoding="utf8")


if __name__ == "__main__":
    main(sys.argv[1:] or ["*"])
