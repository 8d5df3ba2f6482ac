#!/usr/bin/env python3
"""Write the rules of gitleaks that know a token by its own form into tprimat/data/secrets.yaml.

tools/secret_rules.py gitleaks.toml VERSION

Rules that need the words around a token are left out: tprimat/records/redaction.py looks at the names of values itself.
"""

import re
import sys
from pathlib import Path

import tomllib

TARGET = Path(__file__).resolve().parent.parent / "tprimat" / "data" / "secrets.yaml"
HEADER = """\
# Tokens that are known by their own form: rules of gitleaks {version} (https://github.com/gitleaks/gitleaks), MIT License,
# Copyright (c) 2019 Zachary Rice. Written by tools/secret_rules.py from config/gitleaks.toml, with the syntax of Python.
# name: [words of which a text with such a token holds one, in lower case; the pattern]
"""
END = r"""(?:[\x60'"\s;]|\\[nr]|$)"""
CONTEXT = (r"[\w.-]{0,50}?", r"[\s'\"]{0,3}", "kubernetes", "curl-", "private-key", "hashicorp-tf", "nuget", "[[:")


def translated(pattern: str) -> str:
    """Return a pattern of Go in the syntax of Python; a token may end before any sign that it cannot hold."""
    pattern = pattern.replace(END, "(?![A-Za-z0-9])").replace(r"\z", r"\Z").replace(r"\x60", "`")
    return f"(?i){pattern.replace('(?i)', '')}" if "(?i)" in pattern else pattern


def main() -> int:
    """Exit status: 0."""
    rules = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf8"))["rules"]
    lines = []
    for rule in sorted(rules, key=lambda rule: rule["id"]):
        if "regex" not in rule or not rule.get("keywords") or any(part in rule["id"] + rule["regex"] for part in CONTEXT):
            continue
        pattern = translated(rule["regex"])
        re.compile(pattern)
        quoted = "'" + pattern.replace("'", "''") + "'"
        words = ", ".join("'" + word.lower().replace("'", "''") + "'" for word in rule["keywords"])
        lines.append(f"{rule['id']}: [[{words}], {quoted}]\n")
    TARGET.write_text(HEADER.format(version=sys.argv[2]) + "".join(lines), encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
