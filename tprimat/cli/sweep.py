"""Run each of the five strategies of config.yaml in its own folder, then compare them.

./run_all_configs.sh                      both models: output-00 to output-04, all_outputs/compare-00.png to compare-04.png
./run_all_configs.sh llama --steps 3      flags of ./benchmark.py are passed on
./run_all_configs.sh qwen --fresh         also run what an earlier call has completed
"""

import argparse
import sys
from pathlib import Path

from tprimat.cli.cells import SETTABLE, add_request, draw, print_document, refuse_nothing, request_of, show
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
    from tprimat.runner.cells import planned
    from tprimat.runner.grid import strategy_requests
    from tprimat.runner.request import RunRequest
    from tprimat.runner.schedule import complete, exit_status, run_cells

    request = request_of(options, "sweep", "./run_all_configs.sh")
    for option in DECIDED_HERE:
        field = option.field or option.name
        if getattr(request, field) != getattr(RunRequest(), field):
            where, fix = f"--set {option.name}", MODEL_HINT if option.name == "model" else "./benchmark.py"
            raise ConfigError(f"{where} is not for this command.", where=where, fix=fix)
    entries = planned(strategy_requests(request, MODELS[options.models]))
    refuse_nothing(entries)
    cells = [cell for entry in entries for cell in entry.cells]
    results = run_cells(cells, resume=not options.fresh)
    success = complete(results, cells) and not any(entry.refusal and not entry.left_out for entry in entries)
    counting = list(dict.fromkeys(result.cell.label for result in results if result.counts))
    probes = [word for place in request.probes for word in ("--set", f"probes={place}")]
    for folder in sorted(counting):
        success &= draw(PICTURES / f"compare-{folder.removeprefix('output-')}.png", ["--results-dir", folder, *probes])
    if options.json:
        print_document(results)
    else:
        show(entries, results)
        print(f"\nside by side: ./compare.py --results-dir {' '.join(sorted(counting))}", file=sys.stderr)
    return exit_status(results, success=success)
