"""The options of a run, one row each: flags, `--set`, `--sweep`, the words of a stored command and the help come from them.

Commands that do something else have their own flags in their own files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tprimat.config.schema import Precision, Routing, Size
from tprimat.core.accelerators import PlatformName
from tprimat.core.errors import ConfigError
from tprimat.core.flops import CONVENTIONS
from tprimat.core.rows import DATA, document

RUN = ("run",)
BOTH = ("run", "sweep")
WHAT, WORKLOAD = "what to run", "workload"
MOST = 10_000_000
"""The largest count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option: `--set NAME=VALUE` has it, `--sweep NAME=A,B` mostly, and some commands have a flag of its name."""

    name: str
    help: str
    metavar: str = "N"
    group: str = WHAT
    commands: tuple[str, ...] = ()
    """Commands that have a flag of this name."""
    key: str | None = None
    """In the configuration; PLATFORM is the one that runs, STRATEGY and MODEL are those of the run. None: in none."""
    choices: tuple[str, ...] = ()
    kind: Callable[[str], Any] = str
    """Makes the value, or raises ValueError; a Path may be given several times."""
    swept: bool = True
    field: str = ""
    """Of the request, where it has another name."""

    @property
    def flag(self) -> str:
        """What users type before the value: --steps, or --set seed."""
        return f"--{self.name.replace('_', '-')}" if self.commands else f"--set {self.name}"

    def read(self, text: str, origin: str) -> Any:
        """Return the value that a text stands for, or refuse it; `origin` is what was typed before it."""
        if self.choices and text not in self.choices:
            raise ConfigError(f"{origin} is {text[:40]!r}.", where=origin, fix=f"one of: {', '.join(self.choices)}")
        try:
            return self.kind(text)
        except ValueError as error:
            raise ConfigError(f"{origin} is {text[:40]!r}.", where=origin, why=str(error)) from error


def count(text: str) -> int:
    """Read a whole number from 1 on."""
    if not text.isdecimal() or len(text) > len(str(MOST)) or not 1 <= int(text) <= MOST:
        raise ValueError(f"It takes a whole number from 1 to {MOST:,}.")
    return int(text)


def steps(text: str) -> int | str:
    """Read a number of steps, or auto."""
    if text != "auto" and (not text.isdecimal() or len(text) > len(str(MOST))):
        raise ValueError("It takes a whole number, or auto.")
    return text if text == "auto" else int(text)


def price(text: str) -> float:
    """Read a price."""
    value = float(text)
    if not 0 < value <= 1e9:
        raise ValueError("It takes a price such as 2.50.")
    return value


def _degree(name: str, what: str, commands: tuple[str, ...] = ()) -> Option:
    key = f"parallelism.STRATEGY.MODEL.PLATFORM.{what}_model_parallel_size".replace("context_model", "context")
    words = what.replace("_", " ")
    return Option(name=name, help=f"{words} parallelism, instead of --parallel", commands=commands, key=key, kind=count)


DEGREES = (
    _degree("tp", "tensor", RUN),
    _degree("pp", "pipeline", RUN),
    _degree("vpp", "virtual_pipeline"),
    _degree("cp", "context"),
    _degree("ep", "expert"),
)
OPTIONS = (
    Option(
        name="model",
        help="models of config.yaml or of tprimat models: one, several as a,b, or all but those with in_all: false (default)",
        metavar="MODEL",
        commands=RUN,
    ),
    Option(
        name="parallel",
        help="strategies of config.yaml: one, several as a,b; auto: the fastest by prediction; auto:3: run the three predicted "
        "fastest briefly, and take the fastest (default: $PARALLEL, minimal_communication)",
        metavar="STRATEGY",
        commands=RUN,
        field="strategy",
    ),
    *DEGREES,
    Option(name="runs", help="repetitions of each model (default: 1)", commands=BOTH, kind=count, swept=False),
    Option(name="engine", help="default: auto", commands=BOTH),
    Option(name="platform", help="default: this machine's", commands=BOTH, choices=get_args(PlatformName), swept=False),
    Option(
        name="size",
        help="full, or tiny: narrower, with the same heads and layers (default: tiny on a CPU, otherwise full)",
        metavar="SIZE",
        choices=get_args(Size),
    ),
    Option(
        name="gpus",
        help="ranks per node (default: all GPUs here; on a CPU, what the layout needs, or up to 8 if the cores allow)",
        commands=BOTH,
        key="hardware.platforms.PLATFORM.gpus_per_node",
        kind=count,
    ),
    Option(
        name="nodes",
        help="machines; start the same command on each, or use srun",
        commands=RUN,
        key="hardware.platforms.PLATFORM.nodes",
        kind=count,
        swept=False,
    ),
    Option(
        name="gpu",
        help="with --dry-run: predict memory and time for another machine's GPU, such as 'H100 SXM'",
        metavar="NAME",
        commands=RUN,
        swept=False,
    ),
    Option(name="steps", help="optimizer steps", group=WORKLOAD, commands=BOTH, key="training.duration.max_steps"),
    Option(name="warmup", help="steps left out of the metrics, or auto", group=WORKLOAD, key="benchmarking.warmup_steps"),
    Option(
        name="precision",
        help="",
        group=WORKLOAD,
        commands=RUN,
        key="platform_optimizations.PLATFORM.precision",
        choices=get_args(Precision),
    ),
    Option(
        name="data", help="mock, or text:PATH (a file or folder)", metavar="DATA", group=WORKLOAD, key="training.data.dataset"
    ),
    Option(
        name="routing",
        help="how tokens choose experts: natural, or balanced (forced; overstates speed)",
        metavar="HOW",
        group=WORKLOAD,
        key="training.routing",
        choices=get_args(Routing),
    ),
    Option(name="seed", help="seed of weights and data", group=WORKLOAD, key="experiment.seed"),
    Option(
        name="micro_batch_size",
        help="sequences",
        group=WORKLOAD,
        commands=RUN,
        key="training.data.micro_batch_size",
    ),
    Option(name="global_batch_size", help="sequences", group=WORKLOAD, commands=RUN, key="training.data.global_batch_size"),
    Option(name="sequence_length", help="tokens", group=WORKLOAD, commands=RUN, key="training.data.sequence_length"),
    Option(
        name="probes",
        help="a probes.jsonl of this machine, or its folder, besides those in the output folder; may be repeated",
        metavar="PATH",
        kind=Path,
        swept=False,
    ),
)
BY_NAME = {option.name: option for option in OPTIONS}


def option_of(field: str) -> Option:
    """Return the option of a field of the request."""
    return next(option for option in OPTIONS if field in {option.field, option.name})


COUNTING = (
    Option(
        name="flops",
        help="how FLOP are counted: causal, full or 6n (causal)",
        metavar="HOW",
        key="benchmarking.flops_convention",
        choices=CONVENTIONS,
    ),
    Option(
        name="warmup",
        help="steps to leave out, or auto: detected in the step times (auto)",
        key="benchmarking.warmup_steps",
        kind=steps,
    ),
    Option(
        name="peak", help="what utilization divides by: dense, or sparse (dense)", metavar="PEAK", choices=("dense", "sparse")
    ),
    Option(name="cost_per_gpu_hour", help="add a column of cost, in your currency", metavar="PRICE", kind=price),
    Option(
        name="probes",
        help="a probes.jsonl of this machine, or its folder, besides those with the results; may be repeated",
        metavar="PATH",
        kind=Path,
    ),
)
"""How analyses count."""


def assignment(text: str, example: str) -> tuple[str, str]:
    """Split the NAME=VALUE of --set, or refuse it with an example."""
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise ConfigError(f"--set {text} is not KEY=VALUE.", where="--set", fix=f"--set {example}")
    return name.strip(), value


def hints(options: tuple[Option, ...]) -> dict[str, str]:
    """Return what to type in place of flags that do not exist, flag by flag."""
    return {f"--{option.name.replace('_', '-')}": f"--set {option.name}={option.metavar}" for option in options}


def names_listed(options: tuple[Option, ...]) -> str:
    """Return names and help of the options that --set alone has, for the end of a command's help."""
    rows = [(f"{option.name}={option.metavar}", option.help) for option in options if not option.commands]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def removed() -> Mapping[str, str]:
    """Return what to do instead of commands, flags, and the last two words of keys that older scripts may have."""
    names: Mapping[str, str] = document(DATA / "removed.yaml")["removed"]
    return names
