"""The programs that engine_speed.py runs in turn: where each is, how it is started, and what an earlier call has left of it."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path, PurePath

from shallow import write_shallow_config
from speed_layouts import Layout

from tprimat.config.options import OPTIONS
from tprimat.core.accelerators import BACKEND_OF, PLATFORM_OF
from tprimat.core.errors import LaunchError, UserError
from tprimat.engines import bridge, megatron, megatron_lm, nemo, torchtitan
from tprimat.engines.base import Here, engine_named, is_installed
from tprimat.hardware.nodes import this_machine
from tprimat.records.benchmark_file import RunResult
from tprimat.records.discover import load_results
from tprimat.records.environment import changed_variable, processor_name, software_versions, tuning_variables
from tprimat.records.schema import Machine, RunRecord
from tprimat.records.sharing import masked_command
from tprimat.runner.request import RunRequest
from tprimat.runner.schedule import SAME_SOFTWARE

ROOT = Path(__file__).resolve().parent.parent
BENCHMARK = ROOT / "benchmark.py"
NEMO_PYTHON = ROOT / ".venv-nemo" / "bin" / "python"
"""What `make nemo` makes."""
TRANSFORMER_ENGINE = "transformer_engine"
"""The program that is the embedded engine with Transformer Engine's layers."""
GRAPHS = "-graphs"
"""Ends the name of a program that is an embedded engine whose micro-batches are launched as CUDA graphs."""
TUNED_RECIPES = {
    ("llama", "bf16"): "perf_recipes.llama.h100.llama3:llama3_8b_pretrain_8gpu_h100_bf16_config",
    ("llama", "fp8"): "perf_recipes.llama.h100.llama3:llama3_8b_pretrain_8gpu_h100_fp8cs_config",
    ("qwen3_moe", "bf16"): "perf_recipes.qwen.h100.qwen3_moe:qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config",
    ("qwen3_moe", "fp8"): "perf_recipes.qwen.h100.qwen3_moe:qwen3_30b_a3b_pretrain_16gpu_h100_fp8cs_config",
}
"""Model and precision -> the recipe that NVIDIA tuned for it, for the program bridge."""
CURRENT_SCALING = "engine_options.fp8_scaling=current"
"""How the embedded engine's own layers scale in fp8, so that programs differ in speed only."""
REFUSED = 2
"""Exit status of ./benchmark.py for a request that cannot be met."""
AROUND_A_RUN_SECONDS = 15.0
"""Allowed for what a run's record leaves out: planning before it, and writing results after it."""
ASK_NEMO = """
import json
from tprimat.engines.base import is_installed
from tprimat.engines.nemo import REQUIRED_MODULES
from tprimat.records.environment import software_versions
missing = [name for name in REQUIRED_MODULES if not is_installed(name)]
print(json.dumps({"missing": missing, "software": software_versions()}))
"""


@dataclass(frozen=True, kw_only=True)
class Program:
    """An engine with the settings and the Python that it is measured with."""

    name: str
    engine: str
    software: Mapping[str, str]
    """Package -> version, of its Python."""
    python: str = sys.executable
    settings: tuple[str, ...] = ()
    """KEY=VALUE, below platform_optimizations.PLATFORM."""
    data: str | None = None
    """None: as configured."""
    least_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to make: a program under a layout, in a round that counts from 1."""

    layout: Layout
    ranks: int
    program: Program
    round: int
    folder: Path


# Which programs there are.


def program_named(name: str, options: argparse.Namespace) -> Program:
    """Return a program as it is installed here.

    Raises:
        UserError: it is not, or there is none of this name.
    """
    return FINDERS.get(name, _this_python)(name, options)


def _this_python(name: str, options: argparse.Namespace) -> Program:
    if isinstance(error := engine_named(name).available(Here(platform=options.platform)), UserError):
        raise error
    return Program(name=name, engine=name, software=software_versions())


def _transformer_engine(name: str, options: argparse.Namespace) -> Program:
    """Megatron-LM as NVIDIA runs it, in the embedded engine's program: the same weights, batches, clock and scaling in fp8."""
    if not is_installed(TRANSFORMER_ENGINE):
        raise LaunchError(
            f"Transformer Engine is not installed for {sys.executable}.", fix="pip install 'transformer-engine[pytorch]'"
        )
    layers = ("engine_options.layers=transformer_engine", CURRENT_SCALING)
    return replace(_this_python(megatron.ENGINE.name, options), name=name, settings=layers)


def _as_graphs(name: str, options: argparse.Namespace) -> Program:
    program = program_named(name.removesuffix(GRAPHS), options)
    return replace(program, name=name, settings=(*program.settings, "engine_options.cuda_graphs=true"))


def _with_current_scaling(name: str, options: argparse.Namespace) -> Program:
    return replace(_this_python(name, options), settings=(CURRENT_SCALING,))


def _torchtitan(name: str, options: argparse.Namespace) -> Program:
    return replace(_this_python(name, options), data="mock", least_steps=options.peer_steps)


def _nemo(name: str, options: argparse.Namespace) -> Program:
    """NeMo with its own Python, with Transformer Engine's loss, and fp8 as in the embedded engine."""
    default = NEMO_PYTHON if NEMO_PYTHON.exists() else Path(sys.executable)
    python = (options.nemo_python or default).absolute()  # not resolved: a link to Python is what makes it that environment's
    try:
        words = [str(python), "-c", ASK_NEMO]
        said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        what = f"{python} does not run TPrimat: {(getattr(error, 'stderr', None) or str(error)).strip().splitlines()[-1]}"
        raise LaunchError(what, where="--nemo-python", fix="make nemo") from error
    answer = json.loads(said)
    if answer["missing"]:
        what = f"The engine nemo needs {', '.join(answer['missing'])}, not installed for {python}."
        raise LaunchError(what, where="--nemo-python", fix="make nemo")
    settings = ("nemo.cross_entropy_fusion_impl=te", CURRENT_SCALING, "nemo.first_last_layers_bf16=false")
    return Program(name=name, engine=name, data="mock", software=answer["software"], python=str(python), settings=settings)


FINDERS: Mapping[str, Callable[[str, argparse.Namespace], Program]] = {
    TRANSFORMER_ENGINE: _transformer_engine,
    megatron.ENGINE.name + GRAPHS: _as_graphs,
    TRANSFORMER_ENGINE + GRAPHS: _as_graphs,
    bridge.ENGINE.name: _with_current_scaling,
    megatron_lm.ENGINE.name: _with_current_scaling,
    torchtitan.ENGINE.name: _torchtitan,
    nemo.ENGINE.name: _nemo,
}


def peers(options: argparse.Namespace) -> list[Program]:
    """Return the programs of --against, by default those that are installed here, without the engine itself.

    Raises:
        UserError: one that was asked for is not installed.
    """
    if options.against is not None:
        names = dict.fromkeys(name for name in options.against.split(",") if name not in {"none", options.engine})
        return [program_named(name, options) for name in names]
    programs = []
    for name in (name for name in FINDERS if name != options.engine and not name.endswith(GRAPHS)):
        try:
            programs.append(program_named(name, options))
        except UserError as error:
            print(f"without {name}: {error.what}", file=sys.stderr)
    return programs


# In what order they run, and what is left of a time limit.


def jobs_of(layout: Layout, ranks: int, programs: Sequence[Program], options: argparse.Namespace) -> Iterator[Job]:
    """Yield all rounds of a layout. Every second one is in reverse: what drifts (heat, other users) then falls on all alike."""
    for number in range(1, options.rounds + 1):
        name = layout.name + (f"-{number}" if number > 1 else "")
        for program in programs if number % 2 else reversed(programs):
            folder = options.output / name if program.name == options.engine else options.output / program.name / name
            yield Job(layout=layout, ranks=ranks, program=program, round=number, folder=folder)


def expected_seconds(job: Job, made: Sequence[tuple[Job, float]]) -> float | None:
    """Return how long a run may take: the longest of its layout and program so far, else of its program, else of all.

    Args:
        job: the run.
        made: the runs of the series so far, with their seconds.

    Returns:
        seconds; None where nothing has run yet.
    """
    same_program = [(one, seconds) for one, seconds in made if one.program.name == job.program.name]
    same_kind = [(one, seconds) for one, seconds in same_program if one.layout.name == job.layout.name]
    alike = same_kind or same_program or made
    return max((seconds for _, seconds in alike), default=None)


def seconds_of(result: RunResult) -> float | None:
    """Return how long the run of a result took in all, from its record; None if it says nothing, as of a stopped run."""
    run = result.run
    if not has_ended(result) or run.started_at is None or run.ended_at is None:
        return None
    took = datetime.fromisoformat(run.ended_at) - datetime.fromisoformat(run.started_at)
    return took.total_seconds() + AROUND_A_RUN_SECONDS


# One run.


def request_of(job: Job, options: argparse.Namespace) -> RunRequest:
    """Return the request of one run, with the layout as its own strategy."""
    layout, program = job.layout, job.program
    strategy = f"parallelism.{layout.name}.{layout.model}.{options.platform}"
    optimizations = f"platform_optimizations.{options.platform}"
    settings = [
        f"{strategy}.tensor_model_parallel_size={layout.tensor}",
        f"{strategy}.pipeline_model_parallel_size={layout.pipeline}",
        f"{strategy}.expert_model_parallel_size={layout.expert}",
        f"{strategy}.context_parallel_size={layout.context}",
        f"training.routing={layout.routing}",
    ]
    if layout.virtual:
        settings.append(f"{strategy}.virtual_pipeline_model_parallel_size={layout.virtual}")
    if program.name == bridge.ENGINE.name and (recipe := TUNED_RECIPES.get((layout.model, layout.precision))):
        settings.append(f"{optimizations}.bridge.recipe={recipe}")
    if layout.recompute != "none":
        settings.append(f"{optimizations}.recompute={layout.recompute}")
    if layout.optimizer_states != "fp32":
        settings.append(f"{optimizations}.engine_options.optimizer_states={layout.optimizer_states}")
    if layout.fully_sharded:
        settings.append(f"{optimizations}.engine_options.fully_shard=true")
    return RunRequest(
        platform=options.platform,
        model=layout.model,
        strategy=layout.name,
        engine=program.engine,
        gpus=job.ranks,
        steps=max(options.steps, program.least_steps),
        micro_batch_size=layout.micro_batch,
        global_batch_size=layout.global_batch,
        sequence_length=layout.sequence,
        precision=layout.precision,
        data=program.data,
        config=config_of(layout, options.output),
        output=job.folder,
        probes=tuple(options.probes),
        settings=(*settings, *options.settings, *(f"{optimizations}.{setting}" for setting in program.settings)),
    )


def config_of(layout: Layout, folder: Path) -> Path | None:
    """Write the configuration of a layout whose model is not config.yaml's; None where it is."""
    if layout.layers is None and layout.architecture is None:
        return None
    file = folder / f"{layout.name}.yaml"
    write_shallow_config(file, layout.layers, layout.model, layout.architecture)
    return file.resolve()


def make(job: Job, request: RunRequest, *, resume: bool) -> str | None:
    """Run ./benchmark.py once, whose messages pass through; the result is in its records.

    With `resume` it recognizes an earlier run of the same plan itself.

    Returns:
        why it refused the request; None where it did not.
    """
    words = [job.program.python, str(BENCHMARK), *_words(request), *(["--resume"] if resume else [])]
    refusal = ""
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf8", errors="replace") as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                print(line, end="", file=sys.stderr, flush=True)
                refusal = line.removeprefix("error: ").strip() if line.startswith("error: ") else refusal
        except KeyboardInterrupt:  # which the run has got, too: it writes its records first
            process.wait()
            raise
    return refusal or "refused" if process.returncode == REFUSED else None


def words_of(request: RunRequest) -> list[str]:
    """Return the flags of ./benchmark.py that make a request again, with absolute paths."""
    empty = RunRequest()
    words = []
    for option in OPTIONS:
        value = getattr(request, option.field or option.name)
        if option.kind is not Path and value != getattr(empty, option.field or option.name):
            words += [option.flag, str(value)] if option.commands else ["--set", f"{option.name}={value}"]
    for name, path in (("--config", request.config), ("--output-dir", request.output)):
        words += [] if path is None else [name, str(path.absolute())]
    words += [word for place in request.probes for word in ("--set", f"probes={place.absolute()}")]
    words += ["--force"] if request.force else []
    return words + [word for setting in request.settings for word in ("--set", setting)]


def _words(request: RunRequest) -> list[str]:
    return ["--json", *words_of(request)]


def has_ended(result: RunResult) -> bool:
    """Return whether a run says something about its layout, be it that it fails there."""
    return result.run.outcome not in {"running", "interrupted"}


def is_made(job: Job, request: RunRequest, earlier: RunResult | None, platform: str) -> bool:
    """Return whether an earlier run ended by itself, of the same command, on the machine and with the software that are here.

    Where the answer is no, ./benchmark.py --resume looks closer, which takes seconds: it finds the same plan by other words, and
    after a change of config.yaml.
    """
    if earlier is None or not has_ended(earlier) or earlier.run.started_at is None:
        return False
    if datetime.fromisoformat(earlier.run.started_at).timestamp() < (ROOT / "config.yaml").stat().st_mtime:
        return False
    words = (earlier.run.command[1:], masked_command(_words(request)))
    former, now = ([PurePath(word).name for word in some if word != "--resume"] for some in words)  # the folder may have moved
    return former == now and not differs_here(earlier.run, machine_here(platform), job.program.software)


def differs_here(run: RunRecord, here: Machine, software: Mapping[str, str]) -> bool:
    """Return whether accelerator, driver, a library's version or a variable is another than in a run."""
    there = run.nodes[0].accelerator if run.nodes else run.machine.accelerator
    pairs = [(there, here.accelerator), (run.machine.driver, here.driver)]
    pairs += [(run.software.get(name), software.get(name)) for name in SAME_SOFTWARE]
    return any(was != now for was, now in pairs) or changed_variable(run.environment, tuning_variables()) is not None


@cache
def machine_here(platform: str) -> Machine:
    """Return the machine whose runs are asked for, as its records name it."""
    machine = this_machine()
    if machine is not None and PLATFORM_OF[machine.platform] == platform:
        return machine
    name = processor_name() if platform == "cpu" else None
    return Machine(platform=BACKEND_OF[platform], accelerator=name, gpus_per_node=None, nodes=1)


def newest(folder: Path) -> RunResult | None:
    """Return a folder's last run: earlier ones were interrupted, or had another plan."""
    results, _ = load_results([folder]) if folder.exists() else ([], [])
    return max(results, key=lambda result: result.run.started_at or "", default=None)
