"""Run a command in this process, as its script would: the tests of what a command says need no interpreter of their own.

What only a process can show (signals, pipes, start-up time, imports) starts one; each command has at least one test that does.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

from tprimat.cli.main import start

ROOT = Path(__file__).parent.parent
FAKE_PACKAGES = Path(__file__).parent / "fake_packages"
TWO_GPUS = {"FAKE_GPUS": "[{}, {}]", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(FAKE_PACKAGES)}
"""Variables of a machine with two H200 and the fake torchtitan."""
SCRIPTS = {
    "benchmark.py": "run",
    "compare.py": "compare",
    "analyze_peak_throughput.py": "peak",
    "visualize_peak_throughput.py": "peak",
    "extract_primus_metrics.py": "extract",
    "validate_config.py": "validate",
    "run_all_configs.sh": "sweep",
}
DECIDING = ("PARALLEL", "OUTPUT_DIR")
"""Environment variables of the user that would change what a test runs."""


def run_command(program, *arguments, cwd=None, environment=None):
    """The exit status and what was printed, as subprocess.run would return it.

    Args:
        program: a script at the top, or a command of `tprimat`.
        arguments: its flags.
        cwd: where to run it; the root of the checkout by default.
        environment: variables to add.
    """
    picture = ["--picture"] if program == "visualize_peak_throughput.py" else []
    name, words = SCRIPTS.get(program, program), [*picture, *map(str, arguments)]
    prog = program if program in SCRIPTS else f"tprimat {program}"
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    clean = {key: value for key, value in os.environ.items() if key not in DECIDING} | (environment or {})
    with (
        mock.patch.dict(os.environ, clean, clear=True),
        mock.patch.object(sys, "argv", [prog, *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        os.chdir(cwd or ROOT)
        try:
            status = start(name, prog, words)
        except SystemExit as end:
            status = end.code or 0
        finally:
            os.chdir(before)
    return subprocess.CompletedProcess([prog, *words], status, out.getvalue(), err.getvalue())


def only_run(output):
    """The record and the folder of the only run below an output folder."""
    (path,) = (output / "runs").glob("*/run.json")
    return json.loads(path.read_text()), path.parent


def words_in(picture):
    """What a reader sees in an SVG; matplotlib keeps each text as a comment beside its outlines."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    return {(node.text or "").strip() for node in ElementTree.parse(picture, parser).iter() if node.tag is ElementTree.Comment}


@contextlib.contextmanager
def fake_nvml():
    """Import tests/fake_packages/pynvml.py instead of pynvml: $FAKE_GPUS says which GPUs there are, and without it none."""
    real = sys.modules.pop("pynvml", None)
    with mock.patch.object(sys, "path", [str(FAKE_PACKAGES), *sys.path]):
        yield
    sys.modules.pop("pynvml", None)
    if real is not None:
        sys.modules["pynvml"] = real


def benchmark_on(monkeypatch, *asked, **there):
    """Returns ./benchmark.py with words and variables, where NVML is fake and no variable tells of a job or devices."""
    for name in os.environ:
        if name.startswith(("SLURM_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_")):
            monkeypatch.delenv(name)

    def benchmark(*words, run=run_command, **variables):
        with fake_nvml():
            return run("benchmark.py", *asked, *words, environment={**there, **variables})

    return benchmark


def run_script(script, *arguments, cwd=None, environment=None):
    """The same in a process of its own."""
    clean = {key: value for key, value in os.environ.items() if key not in DECIDING}
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=clean | (environment or {}), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
