"""What leaves this machine by any way (page, export, plan.json, --dry-run) holds no secret and no private name."""

import base64
import gzip
import json
import re
import stat

import pytest
from commands import ROOT, run_command
from config.a_config import planned, written
from runs.make_runs import a_run, step_times, steps_of, write_run

from tprimat.config.load import parse_setting
from tprimat.plan.schema import read_plan, write_plan
from tprimat.records.benchmark_file import write_benchmark_file
from tprimat.records.store import RunDirectory
from tprimat.runner.schedule import configuration

RUNS = ROOT / "tests" / "runs" / "h100"
SECRET = "hf_" + "abcdefghijklmnopqrstuvwxyz012345"
ENVIRONMENT = "platform_optimizations.cpu.environment"
SETTINGS = (f"{ENVIRONMENT}.HF_TOKEN={SECRET}", f"{ENVIRONMENT}.MINE=unknown-value", f"{ENVIRONMENT}.NCCL_DEBUG=INFO")
RUN = ("--dry-run", "--platform", "cpu", "--model", "llama", *(word for one in SETTINGS for word in ("--set", one)))


@pytest.mark.parametrize("flags", [(), ("--json",), ("--launcher", "slurm")])
def test_a_dry_run_and_a_job_that_is_only_shown_name_variables_without_their_values(flags, tmp_path):
    done = run_command("benchmark.py", *RUN, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    named = {"--launcher": ("environment.MINE=", "environment.NCCL_DEBUG=INFO")}.get(flags and flags[0], ("MINE", "INFO"))
    assert [part in done.stdout for part in (*named, SECRET, "unknown-value")] == [True, True, False, False]


def test_a_plan_holds_no_unknown_value_is_for_its_user_alone_and_is_still_found_again(tmp_path):
    settings = [parse_setting(one) for one in SETTINGS]
    plan = planned(written(tmp_path), settings=settings)
    write_plan(tmp_path / "plan.json", plan)
    text = (tmp_path / "plan.json").read_text()
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == 0o600
    assert plan.environment == {"HF_TOKEN": SECRET, "MINE": "unknown-value", "NCCL_DEBUG": "INFO"}
    assert SECRET not in text
    assert "unknown-value" not in text
    assert json.loads(text)["environment"]["NCCL_DEBUG"] == "INFO"
    assert configuration(read_plan(tmp_path / "plan.json")) == configuration(plan)
    other = planned(written(tmp_path), settings=[*settings, parse_setting(f"{ENVIRONMENT}.MINE=another")])
    assert configuration(read_plan(tmp_path / "plan.json")) != configuration(other)


def test_a_name_with_a_secret_is_masked_wherever_results_are_shown_and_two_stay_two(tmp_path):
    for place, name in enumerate((f"dp-{SECRET}", f"dp-{SECRET[::-1]}-token={SECRET}")):
        run = a_run(f"run-{place}", strategy=name, engine=f"own-{SECRET}", software={"own": f"1+token={SECRET}"})
        write_run(tmp_path, run, steps_of(run, step_times(4.2 + place, 20), 20))
    shown = []
    for command in (
        ("compare.py", "--output", "c.svg", "--results-dir", "."),
        ("compare.py", "--output", "c.json", "--results-dir", "."),
        ("analyze_peak_throughput.py", "--show-all", "--results-dir", "."),
        ("visualize_peak_throughput.py", "--output", "p.svg", "--results-dir", "."),
        ("report", "--output", "p.html", "."),
        ("export", "--to", "csv", "t.csv", "--results-dir", "."),
        ("archive", ".", "a.tar.gz"),
    ):
        done = run_command(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout + done.stderr)
    assert re.search(r"dp-\[secret\] [0-9a-f]{4} .*ahead of the next", shown[0])
    shown += [file.read_text() for file in tmp_path.glob("*.*") if file.suffix not in {".html", ".gz"}]
    shown += [unpacked((tmp_path / "p.html").read_text()), gzip.decompress((tmp_path / "a.tar.gz").read_bytes()).decode()]
    assert [text for text in shown if SECRET in text] == []


def unpacked(page):
    """The text of a page, with what its scripts unpack."""
    return page + "".join(gzip.decompress(base64.b64decode(one)).decode() for one in re.findall(r"H4sI[\w+/=]+", page))


def test_a_page_an_export_and_a_benchmark_file_hold_nothing_private(tmp_path):
    folder = tmp_path / "output"
    settings = (f"--set=x.token={SECRET}", "--set=y=10.20.30.40")
    words = ("./benchmark.py", "--set", "data=text:/scratch/alicesmith/book.txt", *settings)
    cause = f"401 for https://me:{SECRET}@hub.example.com, see /scratch/alicesmith/x.log, peer 10.20.30.40"
    run = a_run("told", strategy="balanced", command=words, outcome="failed", cause=cause)
    write_run(folder, run, steps_of(run, step_times(4.2, 5), 5))
    RunDirectory(folder / "runs" / "told").write_run(run)
    write_benchmark_file(tmp_path / "b.json", run, (), None)
    for words in (
        ("report", folder, "--output", "p.html"),
        ("export", "--to", "csv", "t.csv", "--results-dir", folder),
        ("compare", "--results-dir", folder, RUNS, "--output", "c.json"),
    ):
        done = run_command(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for file in ("p.html", "t.csv", "b.json", "c.json"):
        text = unpacked((tmp_path / file).read_text())
        assert "told" in text
        assert SECRET not in text, file
        for private in () if file == "c.json" else ("alicesmith", "10.20.30.40", str(tmp_path)):
            assert private not in text, file
    page = unpacked((tmp_path / "p.html").read_text())
    assert "text:[path][left out]" in page
    assert "Fill in the brackets: what they held did not leave the machine that ran it." in page
    assert 'class="copy"' not in page.partition('<section id="commands">')[2].partition("</section>")[0]
