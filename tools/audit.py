"""Name the known vulnerabilities of the versions that constraints.txt pins, with pip-audit: make audit.

Exit status: 0 none is known, or no advisories can be reached, which the last line says; 1 there are some.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
SECONDS = 300


def audited(pins: list[str]) -> list[dict[str, Any]] | None:
    """Return what pip-audit says of each package; None where it reaches no advisories."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pins) + "\n")
        file.flush()
        words = ["-m", "pip_audit", "--requirement", file.name, "--no-deps", "--disable-pip", "--format", "json"]
        command = [sys.executable, *words, "--progress-spinner", "off"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
            packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
        except (subprocess.TimeoutExpired, json.JSONDecodeError):
            return None
    return None if all("skip_reason" in package for package in packages) else packages


def main() -> int:
    """Audit one package, which says whether advisories can be reached, then all of them."""
    pins = [line for line in CONSTRAINTS.read_text(encoding="utf8").splitlines() if "==" in line and not line.startswith("#")]
    numpy = [pin for pin in pins if pin.startswith("numpy==")]
    packages = audited(pins) if audited(numpy) else None
    if packages is None:
        print("audit skipped: no advisories can be reached from here")
        return 0
    for package in packages:
        for advisory in package.get("vulns", ()):
            fixed = ", ".join(advisory["fix_versions"]) or "no version yet"
            print(f"{package['name']} {package['version']}: {advisory['id']}, fixed in {fixed}")
    known = sum(bool(package.get("vulns")) for package in packages)
    asked = sum("skip_reason" not in package for package in packages)
    print(f"audit: {known} of {asked} packages have known vulnerabilities; {len(packages) - asked} could not be looked up")
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main())
