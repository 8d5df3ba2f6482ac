"""Run each of the five strategies of config.yaml in its own folder, then compare them.

./run_all_configs.sh                      both models: output-00 to output-04, all_outputs/compare-00.png to compare-04.png
./run_all_configs.sh llama --steps 3      flags of ./benchmark.py are passed on
./run_all_configs.sh qwen --fresh         also run what an earlier call has completed
"""

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from tprimat.cli.cells import SETTABLE, add_request, make_runs, request_of, show
from tprimat.config.options import DEGREES, option_of
from tprimat.core.errors import ConfigError

MODELS = {"llama": ("llama",), "qwen": ("qwen",), "both": ("llama", "qwen")}
DECIDED_HERE = (option_of("model"), option_of("parallel"), *DEGREES)
MODEL_HINT = "./run_all_configs.sh llama, qwen or both; ./benchmark.py --model for any other"
EPILOG = SETTABLE
PICTURES = Path("all_outputs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a run that this command does not decide, and those of the sweep."""
    add_request(parser, "sweep")
    decided = dict.fromkeys((f"--{option.name}" for option in DECIDED_HERE), "./benchmark.py") | {"--model": MODEL_HINT}
    parser.set_defaults(hints=parser.get_default("hints") | decided)
    parser.add_argument("models", nargs="?", choices=tuple(MODELS), default="both", help="default: both")
    parser.add_argument("--fresh", action="store_true", help="also run what an earlier call has completed")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 when every cell has a run that counts, 130 after Ctrl-C, 143 after SIGTERM, else 1.

    Raises:
        ConfigError: --set gives what this command decides.
        UserError: no cell can run here.
    """
    from tprimat.runner.matrix import plan_matrix
    from tprimat.runner.request import RunRequest
    from tprimat.runner.sweep import exit_status

    request = request_of(options, "sweep", "./run_all_configs.sh")
    for option in DECIDED_HERE:
        field = option.field or option.name
        if getattr(request, field) != getattr(RunRequest(), field):
            where, fix = f"--set {option.name}", MODEL_HINT if option.name == "model" else "./benchmark.py"
            raise ConfigError(f"{where} is not for this command.", where=where, fix=fix)
    entries = plan_matrix(request, MODELS[options.models])
    results, complete = make_runs(entries, resume=not options.fresh, retry_failed=True)
    counting = list(dict.fromkeys(entry.folder for entry in entries if entry.counts_in(results)))
    compared = draw(counting, request.probes)
    show(entries, results, as_json=options.json)
    if len(counting) > 1 and not options.json:
        print(f"\nside by side: ./compare.py --results-dir {' '.join(counting)}", file=sys.stderr)
    refused = any(entry.refusal is not None and not entry.left_out for entry in entries)
    return exit_status(results, success=complete and compared and not refused)


def draw(folders: Sequence[str], probes: Sequence[Path]) -> bool:
    """Draw the picture of each folder; return whether all were drawn. One comparison of all folders follows in words."""
    from tprimat.cli.main import start

    words = [word for place in probes for word in ("--set", f"probes={place}")]
    drawn = True
    for folder in folders:
        picture = PICTURES / f"compare-{folder.removeprefix('output-')}.png"
        with contextlib.redirect_stdout(io.StringIO()):
            drawn &= start("compare", "compare.py", ["--results-dir", folder, "--output", str(picture), *words]) == 0
    return drawn
