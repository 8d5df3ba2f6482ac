"""Every page names files and commands that exist; docs/troubleshooting.md quotes messages that the program prints."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from changes import evidence as evidence_of
from changes import jitter, replace
from commands import SCRIPTS, run_command
from plans import request_of
from pydantic import TypeAdapter

from tprimat.analyze.metrics import MetricOptions, run_metrics
from tprimat.cli.main import COMMANDS, parser_of
from tprimat.config.load import read_config
from tprimat.config.schema import ClusterConfig
from tprimat.logs.failures import classify
from tprimat.plan.build import build_plan
from tprimat.plan.schema import mismatches
from tprimat.records.discover import read_result
from tprimat.records.schema import TelemetrySample
from tprimat.records.store import to_json
from tprimat.report.words import finding_words

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "tests" / "runs"
DOC = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf8")
BLOCKS = re.findall(r"```text\n(.*?)```", DOC, re.DOTALL)
NVIDIA = ("benchmark.py", "--dry-run", "--platform", "nvidia", "--gpus", "8", "--model")
COMMAND_LINES = (
    ("benchmark.py", "--model", "llama", "--platform", "nvidia"),
    (*NVIDIA, "qwen", "--tp", "8", "--pp", "1"),
    (*NVIDIA, "llama", "--gpus", "6", "--parallel", "truly_identical"),
    (*NVIDIA, "llama", "--global-batch-size", "100"),
    (*NVIDIA, "llama", "--engine", "nemo"),
    ("benchmark.py", "--platform", "amd", "--model", "llama", "--engine", "primus"),
    ("compare.py",),
)
ALONE = {"PRIMUS_PATH": "", "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
"""A machine without GPUs and frameworks."""
LOG_LINES = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total capacity of 128.00 GiB of which "
    "780.24 MiB is free.",
    "[Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE) ran for 600004 milliseconds.",
    "RuntimeError: DataLoader worker (pid 123) is killed by signal: Bus error. It is possible that it ran out of shared memory.",
    "torch.distributed.DistStoreError: client socket has timed out after 60s",
    "RuntimeError: The server socket has failed to listen: EADDRINUSE",
)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Everything that the program says about the ten things."""
    folder = tmp_path_factory.mktemp("here")
    texts = [run_command(*words, cwd=folder, environment=ALONE) for words in COMMAND_LINES]
    shown = [done.stdout + done.stderr for done in texts]
    failures = [classify(1, [line], ()) for line in LOG_LINES]
    shown += [f"{failure.cause}\n{failure.hint}" for failure in failures]
    shown += [other_layout(), *held_back_clocks(), unlike_work(folder)]
    return "\n".join(shown)


def other_layout():
    plan = build_plan(read_config(environment={}), request_of("llama", "truly_identical"))
    return "\n".join(mismatches(plan, evidence_of(source="log", tensor_parallel=1)))


def held_back_clocks():
    result = read_result(RUNS / "h100" / "runs" / "h100-llama-0")
    samples = [TelemetrySample(at_seconds=at, gpu=0, throttle_reasons=("power cap",) * (at % 2)) for at in range(10)]
    return map(finding_words, run_metrics(result.run, result.steps, options=MetricOptions(telemetry=samples)).warnings)


def unlike_work(folder):
    """Compare two runs of which one had another batch."""
    run = read_result(RUNS / "h100" / "runs" / "h100-llama-0")
    other = replace(run.run, run_id="other", global_batch_sequences=64)
    for name, record, share in (("one", run.run, 1.0), ("two", other, 0.5)):
        (folder / name).mkdir()
        (folder / name / "run.json").write_text(to_json(record))
        lines = [
            to_json(
                replace(step, tokens=int(share * step.tokens), step_seconds=share * by * step.step_seconds, ended_at_seconds=None)
            )
            for step, by in zip(run.steps, jitter(name, len(run.steps)), strict=True)
        ]
        (folder / name / "steps.jsonl").write_text("\n".join([*lines, ""]), encoding="utf8")
    words = ("--results-dir", folder, "--baseline", folder / "one", "--output", folder / "compare.md")
    return run_command("compare.py", *words).stdout


@pytest.mark.parametrize("line", [line for block in BLOCKS for line in block.splitlines()])
def test_a_message_of_the_troubleshooting_page_is_one_that_is_printed(line, printed):
    assert line in printed


def test_there_are_ten_things_each_with_its_message():
    sections = re.split(r"^## ", DOC, flags=re.MULTILINE)[1:]
    assert [section.split(".")[0] for section in sections] == [str(number) for number in range(1, 11)]
    assert all("```text" in section for section in sections)


def commands_of(page):
    """The commands of a page: lines of its bash blocks, indented ones, and the steps of its YAML."""
    text = page.read_text(encoding="utf8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    lines += re.findall(r"^(?: {4}|      - run: )(.*)$", text, re.MULTILINE)
    return [line for line in lines if STARTED.search(line)]


STARTED = re.compile(r"(?:^|\s)(?:make|(?:\./)?[a-z_]+\.(?:py|sh)|\S*python3? (?:-m tprimat|tools/\S+|benchmarks/\S+))(?=\s|$)")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_accepted(page):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf8"), re.MULTILINE))
    for line in commands_of(page):
        for part in line.split(" && "):
            words = shlex.split(part, comments=True)
            start = next(
                place for place, word in enumerate(words) if STARTED.fullmatch(word) or word.endswith(("python", "python3"))
            )
            program, *words = words[start:]
            if program == "make":
                assert {word for word in words if "=" not in word} <= targets, line
                continue
            if program.endswith(("python", "python3")):
                program, *words = words[1:] if words[0] == "-m" else words
            name = words.pop(0) if program == "tprimat" else SCRIPTS.get(program.removeprefix("./"))
            if name is None:
                assert (ROOT / program).is_file(), line
                continue
            assert name in COMMANDS, line
            parser_of(name, name).parse_args(words)


def test_the_configurations_of_the_pages_are_valid():
    (cluster,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(encoding="utf8"), re.DOTALL)
    assert TypeAdapter(ClusterConfig).validate_python(yaml.safe_load(cluster)["cluster"]).slurm.partition == "gpu"
    (workflow,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "comparing.md").read_text(encoding="utf8"), re.DOTALL)
    assert set(yaml.safe_load(workflow)["jobs"]) == {"configuration", "speed"}


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("benchmarks/results/*.md"))], ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf8")
    named = set(re.findall(r"(?<![\w./])(?:docs|benchmarks|tests|tools|tprimat)/[\w./-]*\w", text))
    linked = set(re.findall(r"\]\(([^):#]+)[^)]*\)", text))
    missing = [name for name in sorted(named) if "NAME" not in name and not (ROOT / name).exists()]
    assert missing + [link for link in sorted(linked) if not (page.parent / link).exists()] == []


def test_users_read_ten_pages_of_20_000_words():
    pages = list(ROOT.glob("docs/*.md"))
    assert len(pages) <= 10
    assert sum(len(page.read_text(encoding="utf8").split()) for page in pages) <= 20_000
