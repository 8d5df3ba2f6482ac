"""The page as a reader meets it, in a real browser; and what it says, in its text."""

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, find_browser
from changes import replace
from commands import run_command
from runs.make_runs import H100, LAPTOP, MI300X, a_run, step_times, steps_of, write_run

from tprimat.cli.main import start
from tprimat.records.schema import TelemetrySample
from tprimat.records.store import to_json

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"
HOSTILE = "llama<img src=x onerror=alert(1)>"
ALL_DRAWN = "document.querySelectorAll('.plot').length === document.querySelectorAll('.plot[data-drawn]').length"
VISIBLE = "[...document.querySelectorAll('#ranking tr[data-group]')].filter(row => row.offsetParent).map(row => row.innerText)"
TRACES = "[...document.querySelectorAll('.plot')].map(plot => plot.data.length)"


def page_of(folder, *arguments):
    """The report on some results, written by its command."""
    target = folder / "report.html"
    start("report", "tprimat report", [*map(str, arguments), "--output", str(target)])
    return target


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    words = ("./benchmark.py", "--json", "--model", "llama")
    commanded = a_run("with-command", strategy="balanced", pipeline_parallel=2, data_parallel=4, command=words)
    write_run(folder, commanded, steps_of(commanded, step_times(4.6, 7), 7))
    strange = a_run("strange", model=HOSTILE, machine=MI300X)
    write_run(folder, strange, steps_of(strange, step_times(4.6, 8), 8))
    return page_of(folder, RUNS / "h100", RUNS / "mi300x", folder)


@pytest.fixture(scope="module")
def text(page):
    return html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style)\b.*?</\1>", "", page.read_text("utf8"), flags=re.S)))


@pytest.fixture(scope="module")
def browser():
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium, or name one in CHROMIUM")
    with Browser(program) as opened:
        yield opened


@pytest.fixture
def opened(browser, page):
    browser.size(1280)
    browser.scheme("light")
    browser.open(page)
    browser.wait(ALL_DRAWN)
    return browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800, 400])
def test_every_panel_is_drawn_without_an_error_or_a_sideways_scroll(browser, page, scheme, width, tmp_path):
    browser.size(width)
    browser.scheme(scheme)
    browser.open(page)
    browser.wait(ALL_DRAWN)
    assert browser.run("document.querySelectorAll('.plot .main-svg').length") >= 6
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert not browser.run("[...document.querySelectorAll('.scroll')].some(one => one.scrollWidth > one.clientWidth)")
    assert browser.errors == []
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == (scheme == "dark")
    ink = browser.run("document.querySelector('.plot .annotation-text tspan, .plot .xtick text').style.fill")
    assert (sum(map(int, re.findall(r"\d+", ink)[:3])) > 400) == (scheme == "dark")
    browser.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_the_axis_of_steps_has_whole_numbers_also_after_a_zoom(browser, tmp_path):
    short, long = a_run("short"), a_run("long", model="qwen")
    write_run(tmp_path / "short", short, steps_of(short, np.array((36.0, 4.4, 4.8)), 7))
    write_run(tmp_path / "long", long, steps_of(long, step_times(4.6, 7), 7))
    plot = "document.querySelector('.plot[data-kind=curves]')"
    numbers = f"[...{plot}.querySelectorAll('.xtick text')].map(text => text.textContent)"
    browser.size(1280)
    browser.open(page_of(tmp_path, tmp_path / "short"))
    browser.wait(ALL_DRAWN)
    assert browser.run(numbers) == ["1", "2", "3"]
    browser.open(page_of(tmp_path, tmp_path / "long"))
    browser.wait(ALL_DRAWN)
    whole = browser.run(numbers)
    browser.run(f"void Plotly.relayout({plot}, {{'xaxis.range': [2.2, 4.1]}})")
    browser.wait(f'JSON.stringify({numbers}) === \'["3","4"]\'')
    browser.run(f"void Plotly.relayout({plot}, {{'xaxis.autorange': true}})")
    browser.wait(f"JSON.stringify({numbers}) === {json.dumps(json.dumps(whole, separators=(',', ':')))}")
    assert browser.errors == []


def test_a_panel_without_a_value_takes_no_place(browser, tmp_path):
    run = a_run("no-memory", machine=LAPTOP, data_parallel=2)
    write_run(tmp_path, run, steps_of(run, step_times(4.6, 7), 7, gigabytes=None))
    browser.size(1280)
    browser.open(page_of(tmp_path, tmp_path / "runs"))
    browser.wait(ALL_DRAWN)
    shown = browser.run("[...document.querySelectorAll('#plots figcaption')].map(caption => caption.innerText)")
    assert shown == ["Throughput per process in tokens/s", "Training loss", "Learning rate", "Step time"]
    assert not browser.run("document.getElementById('plots').innerText.includes('not recorded')")


@pytest.mark.parametrize(("hertz", "shown"), [(1.5e9, True), (1.9e9, False)])
def test_a_clock_below_the_peaks_is_a_part_of_the_waterfall(hertz, shown, tmp_path):
    run = a_run("warm", machine=replace(H100, power_limit_watts=700.0))
    write_run(tmp_path, run, steps_of(run, step_times(4.6, 7), 7))
    samples = [TelemetrySample(at_seconds=at, gpu=0, clock_hertz=hertz, throttle_reasons=("power cap",)) for at in range(240)]
    (tmp_path / "runs" / "warm" / "telemetry.jsonl").write_text("".join(to_json(sample) + "\n" for sample in samples))
    seen = page_of(tmp_path, tmp_path / "runs").read_text("utf8")
    assert ("clock below the peak&#x27;s</text>" in seen) == shown
    assert seen.count('class="wf"') == 1


def test_curves_are_those_of_one_workload(opened):
    curves = "[...document.querySelectorAll('.plot[data-kind=curves]')][0].data"
    models = {text.split("<br>")[0].split(":")[0] for text in opened.run(f"{curves}.map(trace => trace.hovertemplate)")}
    assert len(models) == 1
    assert "of one workload (" in opened.run("document.getElementById('drawn').innerText")


def test_the_head_names_hardware_and_software_once_and_no_paragraph_is_repeated(tmp_path):
    for name, torch in (("20260101-120000-000001-llama-a", "2.8.0"), ("20260102-120000-000001-llama-b", "2.9.0")):
        machine = replace(H100, driver="580.1", power_limit_watts=700.0)
        run = a_run(name, strategy=name[-1], machine=machine, software={"torch": torch, "tprimat": "0.1.0+source.abc"})
        write_run(tmp_path, run, steps_of(run, step_times(4.0, len(torch)), 1))
        other = replace(run, run_id=f"{name}-qwen", model="qwen")
        write_run(tmp_path, other, steps_of(other, step_times(4.0, 5), 1))
    page = page_of(tmp_path, tmp_path).read_text("utf8")
    seen = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)
    assert "8 x H100 SXM, 79.2 GiB, 700 W, driver 580.1" in seen
    assert "torch 2.8.0 or 2.9.0, tprimat 0.1.0<" in seen
    assert seen.count('class="wf"') == 2
    assert "products below the peak" in seen
    assert "20260101-120000" not in seen


def test_the_page_asks_nothing_of_any_server(opened, page):
    assert {url for url in opened.requests if not url.startswith("data:")} == {page.resolve().as_uri()}


def test_a_click_sorts_inside_each_workload_and_a_second_one_turns_it_round(opened):
    button = "[...document.querySelectorAll('#ranking thead button')].find(button => button.innerText === 'median step')"
    cells = "[...body.querySelectorAll('td[data-label=\"median step\"]')].map(cell => Number(cell.dataset.sort))"
    times = f"[...document.querySelectorAll('#ranking tbody')].map(body => {cells})"
    fastest_first = opened.run(times)
    opened.run(f"{button}.click()")
    down = opened.run(times)
    assert opened.run(f"{button}.parentElement.getAttribute('aria-sort')") == "descending"
    opened.run(f"{button}.click()")
    up = opened.run(times)
    assert down == [sorted(body, reverse=True) for body in fastest_first]
    assert up == [sorted(body) for body in fastest_first]
    assert down != up
    assert opened.errors == []


def test_words_choose_rows_and_what_is_drawn(opened):
    rows, traces = len(opened.run(VISIBLE)), opened.run(TRACES)
    opened.fill("#search", "H100 optimized")
    left = opened.run(VISIBLE)
    assert len(left) == 1
    assert "memory_optimized" in left[0]
    assert opened.run("document.getElementById('shown').innerText") == f"1 of {rows}"
    opened.wait(f"{TRACES}[0] === 1 && {TRACES}[2] === 1")
    assert traces[0] == rows
    opened.fill("#search", "MI300X")
    assert len(opened.run(VISIBLE)) == 2
    assert opened.errors == []


def test_text_from_a_record_stays_text(opened):
    assert opened.run("document.querySelectorAll('#ranking img, .plot img, .legend img').length") == 0
    assert HOSTILE in opened.run("document.querySelector('#ranking').innerText")
    assert opened.errors == []


def test_a_plot_that_has_not_come_into_view_is_drawn_for_printing(browser, page):
    """The event before printing waits for nothing."""
    browser.size(1280)
    browser.open(page)
    browser.wait("document.querySelector('.plot[data-drawn]') !== null")
    script = """(() => {
        const missing = [...document.querySelectorAll(".plot")].slice(1);
        for (const plot of missing) { Plotly.purge(plot); delete plot.dataset.drawn; }
        dispatchEvent(new Event("beforeprint"));
        return missing.filter(plot => !plot.dataset.drawn || !plot.querySelector("svg")).length;
    })()"""
    assert browser.run(script) == 0
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.errors == []


def test_a_hundred_runs_of_500_steps_stay_under_8_megabytes_and_open(browser, tmp_path):
    for i in range(100):
        run = a_run(f"run-{i:03d}", machine=(H100, MI300X)[i % 2], engine_options={"flag": i})
        write_run(tmp_path, run, steps_of(run, step_times(4 + i / 30, i, steps=500), i))
    page = page_of(tmp_path, tmp_path)
    assert page.stat().st_size < 8_000_000
    browser.size(1280)
    browser.open(page)
    browser.wait("document.querySelectorAll('.plot[data-drawn]').length > 0")
    assert len(browser.run(VISIBLE)) == 100
    assert browser.errors == []


def test_the_summary_says_who_wins_by_how_much_and_how_sure(text):
    lead = r"MI300X minimal_communication is fastest: 12\.\d % \[1\d\.\d, 1\d\.\d\] ahead of the next"
    assert re.search(rf"{lead}, H100 SXM minimal_communication", text)


def test_failures_warnings_and_commands_are_told(text):
    assert re.search(r"h100-qwen-oom\s.*CUDA out of memory on rank 3", text, re.S)
    assert re.search(r"outliers \(3 scaled MAD\): \d of \d+ steady steps", text)
    assert "./benchmark.py --model llama" in " ".join(text.split())
    assert "Not recorded for:" in text


def test_the_ranking_says_how_far_behind_the_fastest_in_the_words_of_the_comparison(tmp_path):
    compared = run_command("compare.py", "--results-dir", RUNS / "h100", "--output", tmp_path / "x.md").stdout
    assert re.search("^configuration +vs fastest +tokens/s/GPU ", compared, re.MULTILINE)
    assert re.search(r"^minimal_communication +first +7,395 \[", compared, re.MULTILINE)
    rows = page_of(tmp_path, RUNS / "h100").read_text("utf8").split('id="ranking"')[1].split("</table>")[0]
    shown = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", rows.replace("<wbr>", ""))).split())
    assert "configuration vs fastest tokens/s/GPU " in shown
    assert re.search(r"minimal_communication \(DP8\) first 7,395 \[", shown)


def test_a_run_that_did_not_run_what_was_asked_is_not_ranked_but_told(tmp_path):
    run = a_run("odd", mismatches=("asked fp8, ran bf16",))
    write_run(tmp_path, run, steps_of(run, step_times(4.0, 1), 1))
    text = page_of(tmp_path, tmp_path).read_text("utf8")
    assert "what ran is not what was asked: asked fp8, ran bf16" in text
    assert "No run counts" in text


def test_a_damaged_file_is_named_on_the_page_and_in_the_exit_status(tmp_path):
    (tmp_path / "benchmark_cuda_llama.json").write_text("{")
    status = start("report", "tprimat report", [str(tmp_path), str(RUNS / "cpu"), "--output", str(tmp_path / "report.html")])
    assert status == 1
    assert "benchmark_cuda_llama.json is not JSON" in (tmp_path / "report.html").read_text("utf8")


def test_the_same_results_give_the_same_page(page, tmp_path):
    again = page_of(tmp_path, RUNS / "h100", RUNS / "mi300x", page.parent)
    assert again.read_bytes() == page.read_bytes()


def test_work_that_is_not_compared_has_a_heading_of_its_own(tmp_path):
    moe = ROOT / "benchmarks" / "records" / "h200" / "moe"
    seen = page_of(tmp_path, moe / "capacity", moe / "later").read_text("utf8")
    eyebrows = re.findall('<p class="eyebrow">([^<]*)</p>', seen)
    assert len(eyebrows) == len(set(eyebrows)) == 2
    assert sum("expert capacity 1.25" in eyebrow for eyebrow in eyebrows) == 1
