#!/usr/bin/env python3
"""Draw the README's pictures from records: the comparison of four layouts, a waterfall, and the head of the report page.

python3 tools/readme_pictures.py            all; the page needs Chromium
python3 tools/readme_pictures.py --check    whether the first two in the repository are what the records give
"""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from page import page_parser  # noqa: E402

from tprimat.analyze.metrics import MetricOptions  # noqa: E402
from tprimat.report.plots import draw_sheet  # noqa: E402
from tprimat.report.plots.comparison import comparison_sheet  # noqa: E402
from tprimat.runner.analysis import by_folder, compare_runs, read_results  # noqa: E402

RECORDS = ROOT / "benchmarks" / "records" / "h200" / "repeated"
LAYOUTS = [RECORDS / name for name in ("dp_mbs4", "tp2_mbs4", "tp2_pp2_mbs4", "tp4_mbs4")]
IMAGES = ROOT / "docs" / "images"
COMPARISON, PAGE = IMAGES / "comparison.png", IMAGES / "report.png"
WATERFALL = IMAGES / "waterfall.svg"
EXPLAINED = RECORDS.parent / "in-turn-four-programs" / "megatron" / "dp_mbs4" / "1"
PAGE_PIXELS = (1280, 1120)


def draw_comparison(path: Path) -> None:
    """Draw the bars of the comparison."""
    results = by_folder(read_results(LAYOUTS, MetricOptions(), {}), LAYOUTS)
    sheet = comparison_sheet(compare_runs(results.measured, LAYOUTS, None))
    draw_sheet(replace(sheet, panels=sheet.panels[:2]), path)  # throughput and memory


def draw_waterfall(path: Path) -> None:
    """Draw where the throughput of a run went."""
    probes = [word for name in ("probes-1gpu", "probes-4gpu") for word in ("--set", f"probes={RECORDS.parent / name}")]
    words = ["-m", "tprimat", "explain", str(EXPLAINED), *probes, "--picture", str(path)]
    subprocess.run([sys.executable, *words], check=True, cwd=ROOT, capture_output=True)


def photograph_page(path: Path) -> None:
    """Write the report page and take a picture of its head."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("no Chromium here: the picture of the page stays as it is")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        subprocess.run(
            [sys.executable, "-m", "tprimat", "report", *map(str, LAYOUTS), "--output", str(page)], cwd=ROOT, check=True
        )
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
        size = "--window-size={},{}".format(*PAGE_PIXELS)
        subprocess.run([browser, *words, size, f"--screenshot={path}", page.as_uri()], check=True, capture_output=True)


def same_picture(one: Path, other: Path) -> bool:
    """Return whether two PNG files show the same, up to what versions of the font renderer change."""
    from matplotlib.image import imread

    first, second = imread(one), imread(other)
    return first.shape == second.shape and float(np.abs(first - second).mean()) < 0.01


def main() -> int:
    """Exit status: 0, or 1 where --check finds a difference."""
    if not page_parser(__doc__).parse_args().check:
        IMAGES.mkdir(exist_ok=True)
        draw_comparison(COMPARISON)
        draw_waterfall(WATERFALL)
        photograph_page(PAGE)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder, "comparison.png")
        draw_comparison(again)
        draw_waterfall(again.with_suffix(".svg"))
        same = same_picture(COMPARISON, again) and WATERFALL.read_text() == again.with_suffix(".svg").read_text()
        return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
