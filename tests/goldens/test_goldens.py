"""The answers to fixed questions are those of the files here, but for the keys that CHANGED.md lists.

`python tests/goldens/make.py` writes the files; answers.py has the questions.
"""

import json
import math
import os
import re
from fnmatch import fnmatch

import pytest
from goldens.answers import FEW, HERE, KINDS, LAYOUTS, plain, trained_losses

SHARES = {"compare": 3, "plan": 4}
"""Into how many cases the documents of a kind are shared, so that several workers take about as long."""
OR = re.escape(" or ")
TRAINED = 1e-5
"""The tolerance of what is trained: processors add in other orders."""
SHOWN = 12
"""Differences of one document that are printed."""


def flat(value, path=""):
    """The leaves of a document by their path; what is absent has none."""
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    else:
        return {} if value is None or value == "" else {path: value}
    return {place: leaf for key, one in inner for place, leaf in flat(one, f"{path}.{key}" if path else str(key)).items()}


def changes():
    """The rows of CHANGED.md."""
    rows = [line.strip("| ").split(" | ") for line in (HERE / "CHANGED.md").read_text(encoding="utf8").splitlines()]
    return [[cell.strip("` ") for cell in row] for row in rows if len(row) == 4 and row[0] != "golden"]


def moved(path, pattern, target):
    """Where a path goes: each * of the target stands for what a * or an (a or b) of the pattern matched."""
    words = re.sub(r"\\\((.*?)\\\)", lambda match: f"({match[1].replace(OR, '|')})", re.escape(pattern))
    matched = re.fullmatch(words.replace(r"\*", "(.*)"), path)
    parts = iter(matched.groups() if matched else ())
    return re.sub(r"\*", lambda _: next(parts), target) if matched else path


def differences(name, golden, answer, rows, usual=1e-9):
    """What differs between two documents, a line each, after the rows that apply to this golden."""
    before, after = flat(golden), flat(answer)
    tolerances = []
    for pattern, key, what, _ in rows:
        if not fnmatch(name, pattern):
            continue
        if what.startswith("moved to "):
            before = {moved(path, key, what.removeprefix("moved to ")): value for path, value in before.items()}
        elif what.startswith("within "):
            tolerances.append((key, float(what.removeprefix("within "))))
        else:
            assert what in {"gone", "new"}, f"CHANGED.md: {what!r} is neither gone, new, moved to PATH nor within NUMBER"
            after = {path: value for path, value in after.items() if not fnmatch(path, key)}
            if what == "gone":
                before = {path: value for path, value in before.items() if not fnmatch(path, key)}
    lines = []
    for path in dict.fromkeys((*before, *after)):
        tolerance = next((number for key, number in tolerances if fnmatch(path, key)), usual)
        if not same(before.get(path), after.get(path), tolerance):
            lines.append(f"{name}: {path} was {before.get(path)!r}, is {after.get(path)!r}")
    return lines


def same(one, other, tolerance):
    """Whether two leaves are equal: numbers to a relative tolerance."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other))
    if numbers:
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12)
    return type(one) is type(other) and one == other


def golden_of(kind, name):
    """What the answer was."""
    return json.loads((HERE / kind / f"{name}.json").read_text(encoding="utf8"))


def report(lines):
    """Fail with the lines, if there are any."""
    assert not lines, "\n".join(("answers changed; tests/goldens/CHANGED.md says what to do:", *lines))


CASES = [(kind, share) for kind in KINDS if kind != "losses" for share in range(SHARES.get(kind, 1))]


@pytest.mark.parametrize(("kind", "share"), CASES)
def test_answers_are_the_same(kind, share):
    rows, lines = changes(), []
    for name, answer in list(KINDS[kind]())[share :: SHARES.get(kind, 1)]:
        lines += differences(f"{kind}/{name}", golden_of(kind, name), answer(), rows)[:SHOWN]
    report(lines)


REST = pytest.mark.skipif(
    "ALL_LOSSES" not in os.environ, reason="ALL_LOSSES=1 trains them; test_layouts compares them with one rank"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [FEW, pytest.param([name for name in LAYOUTS if name not in FEW], marks=REST)], ids=["few", "rest"]
)
def test_losses_are_the_same(names):
    rows, trained = changes(), trained_losses(names)
    report(
        [
            line
            for name in names
            for line in differences(f"losses/{name}", golden_of("losses", name), trained[name], rows, TRAINED)
        ]
    )


def test_every_file_belongs_to_a_question():
    asked = {HERE / kind / f"{name}.json" for kind, documents in KINDS.items() for name, _ in documents()}
    assert asked == set(HERE.glob("*/*.json"))


def test_a_change_is_noticed_unless_it_is_listed():
    golden = {"steps": [{"loss": 2.0, "old": 1}, {"loss": 3.0}], "outcome": "completed"}
    answer = {"steps": [{"loss": 2.0 * (1 + 1e-8)}, {"loss": 3.0}], "outcome": "completed", "more": {"x": 1}}
    assert differences("a/b", golden, golden, []) == []
    assert len(differences("a/b", golden, answer, [])) == 3
    rows = [["a/*", "steps.*.old", "gone", ""], ["a/b", "more*", "new", ""], ["*", "*.loss", "within 1e-6", ""]]
    assert differences("a/b", golden, answer, rows) == []
    assert len(differences("c/b", golden, answer, rows)) == 2
    renamed = [["*", "steps.*.*", "moved to s.*.of.*", ""]]
    assert differences("a/b", golden, {"s": [{"of": row} for row in golden["steps"]], "outcome": "completed"}, renamed) == []
    assert plain({"words": "a", "n": 1, "empty": []}) == {"n": 1}
