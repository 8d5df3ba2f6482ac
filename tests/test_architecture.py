"""docs/architecture.md: which package may import which, and where the heavy libraries may be imported."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tprimat"

MAY_IMPORT = {
    "core": set(),
    "config": {"core"},
    "records": {"core"},
    "plan": {"core", "config", "records"},
    "predict": {"core", "records"},
    "hardware": {"core", "records"},
    "logs": {"core", "records"},
    "engines": {"core", "plan", "records", "logs", "predict"},
    "launch": {"core", "plan", "records", "logs", "engines", "hardware"},
    "train": {"core", "plan", "records"},
    "megatron": {"core", "plan", "records", "train"},
    "nemo": {"core", "plan", "records", "train", "engines"},
    "bridge": {"core", "plan", "records", "train", "engines", "megatron"},
    "probe": {"core", "records", "hardware"},
    "analyze": {"core", "records"},
    "report": {"core", "records", "analyze", "predict"},
}
MAY_IMPORT["runner"] = set(MAY_IMPORT)
MAY_IMPORT["cli"] = set(MAY_IMPORT)
ANY_PACKAGE = "all but cli"
"""How the table in the docs writes the rows of runner and cli."""
HEAVY = {"torch", "lightning", "pytorch_lightning", "megatron", "nemo", "nemo_run", "fiddle", "transformer_engine"}
HEAVY_PACKAGES = {"train", "megatron", "nemo", "bridge", "probe"}
LAZILY = {"launch"}
"""May import them inside a function: a launcher of one node starts without torch."""
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__main__.py")


@cache
def imported_modules(source: str, *, at_once: bool = False) -> list[str]:
    """The modules that a source imports; at once: outside of functions."""
    names = []
    tree = ast.parse(source)
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which stage is meant"
            module = node.module or ""
            names += [f"{module}.{alias.name}" for alias in node.names] if module == "tprimat" else [module]
    return names


def stage_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def breaches(stage: str, source: str) -> list[str]:
    wrong = []
    for name in imported_modules(source):
        parts = name.split(".")
        if parts[0] == "tprimat" and len(parts) > 1 and stage in MAY_IMPORT and parts[1] != "__version__":
            if parts[1] not in MAY_IMPORT[stage] | {stage}:
                wrong.append(f"{stage} imports {name}")
        elif parts[0] in HEAVY and stage not in HEAVY_PACKAGES | LAZILY:
            wrong.append(f"{stage} imports {name}")
    if stage in LAZILY:
        wrong += [
            f"{stage} imports {name} at once" for name in imported_modules(source, at_once=True) if name.split(".")[0] in HEAVY
        ]
    return wrong


def test_a_stage_imports_only_what_the_table_allows():
    assert {str(path): wrong for path in MODULES if (wrong := breaches(stage_of(path), path.read_text(encoding="utf8")))} == {}


BESIDES_THE_PACKAGE = sorted(path for folder in ("benchmarks", "tools") for path in (ROOT / folder).rglob("*.py"))


def cli_imports(path: Path) -> list[str]:
    return [name for name in imported_modules(path.read_text(encoding="utf8")) if name.split(".")[:2] == ["tprimat", "cli"]]


def test_nobody_imports_cli():
    paths = [path for path in MODULES if stage_of(path) != "cli"] + BESIDES_THE_PACKAGE
    assert [path for path in paths if cli_imports(path)] == []


def test_the_check_covers_benchmarks_and_tools():
    assert {ROOT / "benchmarks" / "finetune_qwen3" / "jobs.py", ROOT / "tools" / "h200_page.py"} <= set(BESIDES_THE_PACKAGE)
    lines = (ROOT / "docs" / "architecture.md").read_text(encoding="utf8").splitlines()
    (row,) = [line for line in lines if "benchmarks, tools" in line]
    assert row.endswith(f"| benchmarks, tools | {ANY_PACKAGE} |")


def test_every_stage_stands_in_the_table():
    stages = {stage_of(path) for path in MODULES} - {"__init__"}
    assert stages == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ("analyze", "import tprimat.plan.schema"),
        ("core", "from tprimat import records"),
        ("runner", "def f():\n    import torch"),
        ("launch", "import torch"),
    ],
)
def test_the_check_itself_finds_a_sideways_import(stage, line):
    assert breaches(stage, line)


def test_the_table_in_the_docs_is_the_table_enforced():
    rows = {}
    for line in (ROOT / "docs" / "architecture.md").read_text(encoding="utf8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name, allowed in zip(cells[0::3], cells[1::3], strict=False):
            if name in MAY_IMPORT and len(cells) == 5:
                rows[name] = set(MAY_IMPORT) - {"cli"} if allowed == ANY_PACKAGE else set(allowed.split())
    allowed = {name: others or {"–"} for name, others in MAY_IMPORT.items()}
    assert {name: others - {name} for name, others in rows.items()} == {name: others - {name} for name, others in allowed.items()}
