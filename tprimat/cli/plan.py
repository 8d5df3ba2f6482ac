"""Predict which layout trains a model fastest on some GPUs, and what fits, in seconds and without a GPU."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tprimat.cli.common import doing, print_json
from tprimat.core.errors import ConfigError
from tprimat.core.implementations import DISPATCHERS
from tprimat.core.workload import Routing

LARGE = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Numbers of GPUs that --budget and --deadline choose from where --gpus names none."""
ROUTINGS: dict[str, Routing] = {"natural": "natural", "forced": "balanced"}
"""How tokens choose experts: a user's word -> a workload's."""


def _amount(text: str) -> float:
    """Return a positive number, with K, M, B or T for thousands to trillions."""
    number, scale = (text[:-1], LARGE[text[-1].upper()]) if text[-1:].upper() in LARGE else (text, 1.0)
    try:
        amount = float(number) * scale
    except ValueError:
        amount = 0.0
    if not 0 < amount < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number, such as 2.5, 300B or 1T")
    return amount


def _routing(text: str) -> dict[str, Any]:
    """Return routing, dispatcher and capacity, as far as they are said."""
    asked: dict[str, Any] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        if word in ROUTINGS:
            asked["routing"] = ROUTINGS[word]
        elif word in DISPATCHERS:
            asked["dispatcher"] = word
        elif name == "capacity":
            asked["capacity"] = _amount(value)
        else:
            known = ", ".join([*ROUTINGS, *DISPATCHERS, "capacity=X"])
            raise argparse.ArgumentTypeError(f"{word!r} is not one of {known}")
    return asked


TYPES = {"amount": _amount, "routing": _routing}
"""Of flags of this command alone."""


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, or 1 where nothing fits."""
    from tprimat.records.discover import check_probes
    from tprimat.report import plan
    from tprimat.report.tables import screen_of
    from tprimat.runner.planning import LayoutsAsked, answer, enough_gpus, model_asked, price_per_hour

    if options.model is None:
        raise ConfigError(
            "plan needs a model.", where="--model", fix="--model llama-3.1-8b, or another of python3 -m tprimat models"
        )
    shape, batch, tokens = model_asked(options.model)
    request = LayoutsAsked(
        shape=shape,
        accelerator=options.gpu,
        gpus=options.gpus[0] if options.gpus else None,
        nodes=options.nodes,
        global_batch=options.global_batch_size or batch,
        sequence_tokens=options.sequence_length or tokens,
        precision=options.precision,
        **options.routing,
        engine=options.engine,
        probes=check_probes(options.probes),
    )
    wishes = plan.Wishes(price=options.price or price_per_hour(options.gpu), tokens=options.tokens, whole=options.all)
    chooses = options.budget is not None or options.deadline is not None
    if chooses and (wishes.tokens is None or (options.budget is not None and wishes.price is None)):
        missing = "--tokens 1T" if wishes.tokens is None else "--price 2.5"
        raise ConfigError("--budget and --deadline need --tokens; --budget also needs a price.", where="--budget", fix=missing)
    asked: Sequence[int | None] = options.gpus or (COUNTS if chooses else (None,))
    screen = screen_of(sys.stdout)
    with doing("predicting all layouts ..."):
        answers = [answer(replace(request, gpus=count)) for count in asked]
        chosen, rates = rated = plan.chosen(answers, wishes, options.budget, options.deadline) if len(answers) > 1 else answers[0]
        missing_here = not chosen.fitting and not options.json
        enough = enough_gpus(chosen.question, rates, any_engine=request.engine is None) if missing_here else None
    if options.json:
        others = {"gpu_counts": [plan.document(*one, wishes) for one in answers]} if len(answers) > 1 else {}
        print_json({**plan.document(*rated, wishes), **others})
    else:
        name = chosen.question.work.shape.name
        wishes = replace(wishes, command=f"./benchmark.py --model {options.model or name}")
        if len(answers) > 1:
            print(plan.counts_text(answers, wishes, screen), end="\n\n")
        if chosen.fitting and not plan.keeps(chosen.fitting[0], wishes, options.budget, options.deadline):
            print(f"{plan.LIMIT_NOT_KEPT} {'cheapest' if options.deadline is None else 'fastest'}.\n")
        print(plan.text(rated, screen, enough, wishes))
        if options.probes and not rates.measured:
            print(f"The probes are not used: none of them ran on {rates.accelerator}.", file=sys.stderr)
    return 0 if chosen.fitting else 1
