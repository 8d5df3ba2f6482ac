#!/usr/bin/env python3
"""Write benchmarks/results/explain.md: parts of a step with a trace beside those without one, and cases made worse on purpose.

python3 tools/explain_page.py
python3 tools/explain_page.py --check    whether the page is what the records give
"""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from page import page_parser, update_page  # noqa: E402
from profile_figures import read_summary  # noqa: E402

from tprimat.analyze.metrics import MetricOptions  # noqa: E402
from tprimat.analyze.trace import ProfileSummary  # noqa: E402
from tprimat.analyze.waterfall import EXCHANGES, LOSSES  # noqa: E402
from tprimat.core import units  # noqa: E402
from tprimat.core.errors import MetricError, UserError  # noqa: E402
from tprimat.core.units import signed  # noqa: E402
from tprimat.records.discover import probes_in  # noqa: E402
from tprimat.report.explain import Explanation, text  # noqa: E402
from tprimat.report.names import LOSS_NAMES  # noqa: E402
from tprimat.report.tables import table  # noqa: E402
from tprimat.runner.against import against  # noqa: E402
from tprimat.runner.analysis import read_results  # noqa: E402
from tprimat.runner.explain import explained, newest, trace_of_run  # noqa: E402
from tprimat.runner.reproduce import refuse_unlike  # noqa: E402

PAGE = ROOT / "benchmarks" / "results" / "explain.md"
RECORDS = ROOT / "benchmarks" / "records"
H200, CASES = RECORDS / "h200", RECORDS / "explain-cases"
TRACED = (
    ("DP2, bf16", "in-turn-two-gpus/megatron/dp_mbs4", "profiles/dp2.json"),
    ("DP4, bf16", "repeated/dp_mbs4", "profiles/dp4.json"),
    ("TP2, bf16", "cuda-graphs/third-machine/megatron/tp2_mbs4", "profiles/tp2.json"),
    ("20 layers, fp8", "output-layer/mbs4/off", "profiles/cut_fp8.json"),
    ("20 layers, fp8 output layer", "output-layer/mbs4/on", "profiles/cut_fp8_out.json"),
    ("EP2, bf16", "moe/natural/engine", "moe/profiles/natural.json"),
)
"""Title, folder of a record, and the summary of a trace of the same configuration on another day."""
SHOWN = ("repeated/dp_mbs4", "in-turn-four-programs/megatron/dp_mbs4/1")
"""README's fastest layout on four GPUs, and its waterfall on two."""
SOURCES = "From probes of H200, without a trace. The first record has no telemetry, so its clock is part of the products."
ROWS = (
    "dgx-cloud-llama-3.1-8b-bf16",
    "torchtitan-llama-3.1-8b-compiled",
    "dgx-cloud-llama-3.1-8b-fp8",
    "megatron-bridge-llama-3-8b-fp8",
    "torchtitan-llama-3.1-8b-float8",
)
"""Published on H100, of models whose layers are those of Llama 3.1 8B."""
REPRODUCED = ("torchtitan-llama-3.1-8b-compiled", "dgx-cloud-llama-3.1-8b-bf16", "megatron-bridge-2604-llama-3-70b-h100")
"""Rows of which proxies ran on one, two and four GPUs."""
EXPECTED = {
    "first-machine/late_host": "host",
    "first-machine/smaller_micro_batch": "products",
    "third-machine/uneven_ranks": "uneven",
}
"""Case -> the part that should grow by what the step does."""
USUAL = "dp2"
"""The case of each machine in which nothing was made worse."""
LIMIT = 0.03
TOGETHER = {"pipeline": "bubble"}
"""Parts that a trace cannot tell apart, and the one under which both are compared."""


def seconds_of(explanation: Explanation, other: Explanation | None = None) -> dict[str, float]:
    """Return the parts of a step by name; communication as one part where the trace of the other does not say between whom."""
    seconds: dict[str, float] = {}
    one = any(loss.name == "exchange" for side in (explanation, other or explanation) for loss in side.parts.losses)
    for loss in explanation.parts.losses:
        name = "exchange" if one and loss.name in EXCHANGES else TOGETHER.get(loss.name, loss.name)
        seconds[name] = seconds.get(name, 0.0) + loss.seconds
    return seconds


def explain_one(place: Path, trace: ProfileSummary | None) -> Explanation:
    """Explain the newest run below a folder, by all probes of its kind of machine."""
    measured = newest(read_results([place], MetricOptions(), {}).measured, place)
    probes, _ = probes_in([RECORDS / "h100" if place.is_relative_to(CASES) else H200])
    return explained(measured, probes, trace)


def explain_both(place: Path) -> tuple[Explanation, Explanation]:
    """Explain a run without and with the trace that it left."""
    bare = explain_one(place, None)
    result = bare.measured.result
    return bare, explain_one(place, trace_of_run(result.run, result.path))


def both_ways(pairs: Sequence[tuple[str, Explanation, Explanation]]) -> str:
    """Return the table of parts without and with a trace, and their difference as a share of the step."""
    header = ["part, % of the step", *(title for title, _, _ in pairs)]
    columns, worst = [], []
    for title, bare, traced in pairs:
        one, other, step = seconds_of(bare, traced), seconds_of(traced, bare), bare.parts.step_seconds
        columns.append({name: (one.get(name, 0.0) / step, other.get(name, 0.0) / step) for name in LOSSES})
        worst += [
            f"{title}: {LOSS_NAMES[name]} {units.signed_percent(ours - theirs)}"
            for name, (ours, theirs) in columns[-1].items()
            if abs(ours - theirs) > LIMIT and name != "rest"
        ]
    rows = []
    for name in LOSSES:
        if any(column[name] != (0.0, 0.0) for column in columns):
            cells = [f"{signed(ours * 100)} / {signed(theirs * 100)}" for ours, theirs in (column[name] for column in columns)]
            rows.append([LOSS_NAMES[name], *cells])
    over = "\n".join(f"- {line}" for line in worst) or "- none"
    return f"{table(header, rows)}\n\nParts that differ by over 3 % of the step (without a trace minus with one):\n\n{over}\n"


def of_cases() -> str:
    """Return the table of cases that were made worse on purpose, with and without their traces."""
    places = sorted(one for one in CASES.glob("*/*") if one.is_dir())
    explanations = {place.relative_to(CASES).as_posix(): explain_both(place) for place in places}
    lines = []
    for case, part in EXPECTED.items():
        machine, name = case.split("/")
        for number, how in enumerate(("without", "with")):
            usual, worse = explanations[f"{machine}/{USUAL}"][number], explanations[case][number]
            before, after = seconds_of(usual), seconds_of(worse)
            grown = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in LOSSES}
            largest = sorted(grown, key=lambda name, grown=grown: -abs(grown[name]))[:4]
            words = ", ".join(f"{LOSS_NAMES[name]} {signed(grown[name] * 1e3, 0)}" for name in largest)
            longer = worse.parts.step_seconds - usual.parts.step_seconds
            cells = [signed(longer * 1e3, 0), LOSS_NAMES[part], signed(grown[part] * 1e3, 0), words]
            lines.append([f"`{name}`", how, *cells])
    header = ["case", "trace", "step, ms", "expected", "shown, ms", "parts that changed most, ms"]
    cases = table(header, lines, left=2)
    named = ((f"{case.split('/')[1]}, {case.split('-')[0]}", *both) for case, both in explanations.items())
    alike = [one for one in named if not one[0].startswith("uneven_ranks")]
    return f"""
## Cases made worse on purpose

Llama with six layers, DP2 on two H100 (`benchmarks/explain_cases.py`), each against `dp2` on the same machine: what the step grew
by, and what the part that was made worse did. A late host leaves the GPU idle, which then draws less power, so that its clock
rises. In `uneven_ranks` another program shares the second GPU from step 3 on.

{cases}

The same runs and others, without / with their own traces:

{both_ways(alike)}"""


def recorded(place: Path) -> Explanation | None:
    """Explain the newest run below a folder by published rates; None where no step counts."""
    with contextlib.suppress(MetricError):
        return explained(newest(read_results([place], MetricOptions(), {}).measured, place), ())
    return None


def of_rows() -> str:
    """Return how many recorded runs lie in the interval that a published row gives, and three of them in full."""
    places = sorted(one.parent for one in RECORDS.glob("h?00/in-turn*/*/*/1"))
    runs = [
        explanation
        for explanation in map(recorded, places)
        if explanation and explanation.workload and not explanation.workload.shape.experts
    ]
    lines = []
    for row in ROWS:
        beside = []
        for explanation in runs:
            with contextlib.suppress(UserError):
                refuse_unlike(row, explanation.measured.result.run)
                beside.append(against(explanation, row, ()))
        errors = [one.here / (one.here - one.parts["rest"]) - 1 for one in beside]
        within = sum(one.within is True for one in beside)
        error = (sum(error**2 for error in errors) / len(errors)) ** 0.5
        published = f"{beside[0].there / 1e12:,.0f}"
        lines.append([f"`{row}`", published, str(len(beside)), str(within), units.percent(error)])
    blocks = []
    for row in REPRODUCED:
        ran = explain_one(RECORDS / "reproduced" / row, None)
        traced = explain_one(RECORDS / "reproduced" / row, trace_of_run(ran.measured.result.run, ran.measured.result.path))
        blocks.append(f"```text\n{text(replace(traced, against=against(traced, row, ())), 'tflops')}\n```")
    header = ["row", "TFLOP/s/GPU", "runs", "within", "measured over expected, root mean square"]
    return f"""
## Published rows

`tprimat reproduce ROW RUN` on every run of the row's layers and dtype in the records of H100 and H200 taken in turn, on one, two
and four GPUs: Llama 3.1 8B whole and with fewer layers, under all layouts and by several programs, without probes of the machine.
The calibration has seen most of these runs, so this shows that rows and runs agree, not how far a new machine will be off.

{table(header, lines)}

Three rows were run as `tprimat reproduce ROW --set engine=megatron --set profiling.enabled=true` on one, two and four H100: fewer
layers of the same model, with the row's shapes and as many of its groups of ranks as fit. The calibration has not seen these. The
trace of the first was not kept, so its parts are predicted:

{(chr(10) * 2).join(blocks)}
"""


def of_readme() -> str:
    """Return the waterfalls of the runs that README shows."""
    shown = [text(explain_one(H200 / place, None), "tflops") for place in SHOWN]
    blocks = "\n\n".join(f"```text\n{one}\n```" for one in shown)
    return f"\n## The README's numbers\n\n{SOURCES}\n\n{blocks}\n"


def page() -> str:
    """Return the page."""
    pairs = []
    for title, place, profile in TRACED:
        trace = read_summary(H200 / profile)
        pairs.append((title, explain_one(H200 / place, None), explain_one(H200 / place, trace)))
    return f"""# Where the throughput went, with a trace and without

`tools/explain_page.py` wrote this page from the records in `benchmarks/records`. Each cell has a part of the step
without a trace (predicted from probes of the same kind of machine, or read from telemetry), then with one. The traces are of
other runs of the same configuration, some by older versions, which also makes parts differ.

{both_ways(pairs)}{of_readme()}{of_rows()}{of_cases()}"""


def main() -> int:
    """Exit status: 0, or 1 where --check finds a difference."""
    return update_page(PAGE, page(), check=page_parser(__doc__).parse_args().check, command="python3 tools/explain_page.py")


if __name__ == "__main__":
    sys.exit(main())
