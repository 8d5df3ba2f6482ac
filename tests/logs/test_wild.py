"""Logs of the field get their right answers: how the last attempt ended and why, of which device, with which numbers.

Reduced from public logs and reports, which docs/engines.md lists; some have a public wording between lines that are made up.
"""

import re
import shlex
from pathlib import Path

import yaml
from commands import run_command

from tprimat.logs.parse import LogReading

HERE = Path(__file__).parent
FOLDERS = (HERE / "wild", HERE.parent / "goldens" / "wild")
ANSWERS = yaml.safe_load((HERE / "wild" / "answers.yaml").read_text(encoding="utf8"))


def test_every_log_gets_its_right_answer(tmp_path):
    wrong = []
    for answer in ANSWERS:
        name, status = answer["log"], answer["status"]
        path = next((folder / f"{name}.log" for folder in FOLDERS if (folder / f"{name}.log").exists()), None)
        (tmp_path / "train.log").write_text(path.read_text(encoding="utf8") if path else answer["text"], "utf8", newline="")
        done = run_command("extract_primus_metrics.py", "--log-file", tmp_path / "train.log", *shlex.split(answer["flags"]))
        said = re.sub(r"outcome (.+?) cause ", r"\1: ", " ".join(f"{done.stdout} {done.stderr}".split()))
        said = re.sub(r" (?:\[[^]]*\]|\(n = \d+\)) tokens/s/GPU", " tokens/s/GPU", said)
        wrong += [] if done.returncode == status and all(words in said for words in answer["says"]) else [f"{name}: {said}"]
        assert "exit code" not in said, name
    assert not wrong, "\n".join(wrong)


def test_every_log_has_an_answer():
    assert {path.stem for path in FOLDERS[0].glob("*.log")} <= {answer["log"] for answer in ANSWERS}


def test_the_docs_have_a_row_for_every_log_under_the_framework_that_wrote_it():
    page = (HERE.parents[1] / "docs" / "engines.md").read_text(encoding="utf8").partition("## Logs that prove the readers")[2]
    rows = {log: name for name, log in re.findall(r"^\| ([^|]+) \| (\w+) \|", page, re.M)}
    logs = {path.stem: path for folder in (HERE, *FOLDERS) for path in folder.glob("*.log")}
    assert rows.keys() - {"log"} == logs.keys()
    for name, path in logs.items():
        reading = LogReading(name=name)
        reading.add(path.read_text(encoding="utf8").splitlines())
        wrote = reading.dialect.name if reading.dialect else "any"
        assert rows[name].lower().startswith((wrote, "composer", "nemo automodel")), name
