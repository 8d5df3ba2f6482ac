"""Predict which layout trains a model fastest on some GPUs, and what fits, in seconds and without a GPU.

tprimat plan --architecture llama-3.1-70b --accelerator "NVIDIA H100 80GB HBM3" --gpus 64
tprimat plan --architecture mixtral-8x7b --accelerator MI300X --gpus 64 --nodes 8 --sequence-length 4096
tprimat plan --architecture llama-3.1-8b --probes output     on this machine, by its own probes
tprimat plan --model qwen --accelerator "H200 SXM" --gpus 8     as config.yaml has it
tprimat plan --architecture llama-3.1-8b --picture plan.png
tprimat plan --architecture llama-3.1-405b --accelerator "H100 SXM" --gpus 1024,4096,16384       what more GPUs gain
tprimat plan --accelerator "H100 SXM" --gpus 8     which models fit
tprimat plan --architecture llama-3-70b --accelerator "H100 SXM,H200 SXM,MI300X" --gpus 16,32     which GPUs to rent

exit status: 0, 1 if nothing fits (on any number of GPUs), 2 the request is invalid
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.common import add_probes, counts, doing, positive, print_json
from tprimat.engines import ENGINE_NAMES

if TYPE_CHECKING:
    from tprimat.core.models import ModelShape
    from tprimat.runner.planning import PlanRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--architecture", metavar="MODEL,...", default="all", help="names of tprimat models, or all (all)")
    which.add_argument("--model", metavar="NAME", help="a model of config.yaml, with its batch and sequence length")
    parser.add_argument(
        "--accelerator", metavar="NAME,...", help="device names or rows of tprimat models, or all (this machine's)"
    )
    parser.add_argument(
        "--gpus", type=counts, metavar="N,...", help="total number, or several to compare (this machine's; 8 of another)"
    )
    parser.add_argument("--nodes", type=positive, metavar="N", help="machines (as many as hold 8 GPUs each)")
    parser.add_argument("--global-batch-size", type=positive, metavar="N", help="sequences per step (2 per GPU, at least 128)")
    parser.add_argument("--sequence-length", type=positive, metavar="N", help="tokens (8192, or the model's context)")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16", help="default: bf16")
    parser.add_argument(
        "--engine", choices=(*ENGINE_NAMES, "megatron-lm"), help="default: megatron; megatron-lm for what it cannot train"
    )
    add_probes(parser, "instead of published rates")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw memory and time of the fastest layouts, by part")
    parser.add_argument("--json", action="store_true", help="print all layouts as one JSON document")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, or 1 where nothing fits on any number of GPUs."""
    from tprimat.core.errors import ConfigError
    from tprimat.runner.plan_choices import accelerators_of, shapes_of
    from tprimat.runner.planning import PlanRequest, configured

    request = PlanRequest(
        architecture=options.model or options.architecture,
        accelerator=options.accelerator,
        gpus=options.gpus[0] if options.gpus else None,
        nodes=options.nodes,
        global_batch=options.global_batch_size,
        sequence_tokens=options.sequence_length,
        precision=options.precision,
        engine=options.engine,
        probes=tuple(options.probes),
    )
    names = accelerators_of(options.accelerator)
    shapes: Sequence[str | ModelShape] = shapes_of(options.architecture)
    if options.model:
        request = configured(request)
        shapes = [request.architecture]
    several = len(shapes) > 1 or len(names) > 1
    if options.picture and (several or len(options.gpus or ()) > 1):
        fix = "one model, one accelerator and one number of GPUs"
        raise ConfigError("A picture shows the layouts of one plan.", where="--picture", fix=fix)
    if several:
        return _choices(options, request, shapes, names)
    request = replace(request, architecture=shapes[0], accelerator=names[0])
    return _layouts(options, request)


def _choices(
    options: argparse.Namespace, request: "PlanRequest", shapes: "Sequence[str | ModelShape]", names: "Sequence[str | None]"
) -> int:
    """Compare models or accelerators."""
    from tprimat.report.plan_choices import choices_document, choices_text
    from tprimat.report.screen import screen_of
    from tprimat.runner.plan_choices import plan_choices

    with doing("predicting ...") as progress:
        found = plan_choices(request, shapes, names, sorted(options.gpus or ()), progress)
    if options.json:
        print_json(choices_document(found))
    else:
        print(choices_text(found, options.precision, screen_of(sys.stdout)))
    return 0 if any(choice.best for choice in found) else 1


def _doing(request: "PlanRequest", gpus: Sequence[int] | None) -> str:
    """Return what a plan that takes long does."""
    model = request.architecture
    ends = dict.fromkeys(f"{end(gpus):,}" for end in (min, max)) if gpus else ()
    numbers = f" on {' to '.join(ends)} GPUs" if ends else ""
    return f"predicting all layouts of {model if isinstance(model, str) else model.name}{numbers} ..."


def _command_of(model: str | None, architecture: str) -> str:
    """Return the command that runs a model of config.yaml; None: one that the command itself describes."""
    if model is not None:
        return f"./benchmark.py --model {model}"
    model = architecture.replace(".", "_")
    row = f"--set models.{model}"
    return f"./benchmark.py --model {model} {row}.name={architecture} {row}.architecture={architecture}"


def _layouts(options: argparse.Namespace, request: "PlanRequest") -> int:
    """Rank the layouts of one model, or of several numbers of GPUs show what more of them gain."""
    from tprimat.report import plan
    from tprimat.report.screen import screen_of
    from tprimat.runner.planning import ANY_ENGINE, answer, answers, configured_name, ways_out

    several, named = len(options.gpus or ()) > 1, request.engine is not None
    engines = ANY_ENGINE if several or named else ()
    with doing(_doing(request, options.gpus)):
        rated = answers(request, sorted(options.gpus)) if several else [answer(request)]
        ways = plan.NO_WAY if options.json else ways_out(rated, engines=engines, any_engine=not named)
    if options.json:
        documents = [plan.document(*one) for one in rated]
        print_json({"scaling": documents} if several else documents[0])
    elif several:
        print(plan.scaling_text(rated, screen_of(sys.stdout), ways))
    else:
        name = rated[0][0].question.work.shape.name
        command = _command_of(options.model or configured_name(name), name)
        print(plan.text(*rated[0], screen_of(sys.stdout), ways, command))
    if options.picture:
        from tprimat.report.plots.plan import draw_plan

        draw_plan(*rated[0], options.picture)
        print(f"written: {options.picture}", file=sys.stderr)
    return 0 if any(one.fitting for one, _ in rated) else 1
