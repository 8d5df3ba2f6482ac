"""What every engine answers about itself, how --engine chooses one, and the engines that our own worker trains."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

from tprimat.core.accelerators import PlatformName
from tprimat.core.errors import ConfigError, LaunchError, UserError
from tprimat.core.implementations import Implementation, LossKind, Options, Version
from tprimat.core.models import ModelShape
from tprimat.core.rows import DATA, document
from tprimat.engines import AUTO, ENGINE_NAMES, FALLBACK
from tprimat.logs.fields import Dialect, LineFields
from tprimat.plan.schema import PrimusOptions, PrimusStart, RunPlan
from tprimat.records.environment import package_version, software_versions
from tprimat.records.store import RunDirectory

Where = Callable[..., str]
"""The keys of a setting -> its place, such as "config.yaml:84 training.data.micro_batch_size"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A process to start."""

    argv: tuple[str, ...]
    ranks_per_node: int | None = None
    """argv follows torchrun's own words, which start it this many times on each node. None: argv is a whole command line."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the parent's environment."""
    directory: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    """Path -> text to write before the start, such as a generated experiment file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """What an engine needs to know of the machine and the user's choices before there is a plan."""

    platform: PlatformName
    primus_path: str | None = None
    primus: PrimusOptions = field(default_factory=PrimusOptions)


class Engine(ABC):
    """A framework that can be started. Nothing outside this package compares engine names."""

    name: ClassVar[str]
    clock: ClassVar[Literal["step_end", "framework"]] = "framework"
    """Who times a step: our callback, or the framework itself, in its log."""
    trainer: ClassVar[str | None] = None
    """The module whose `train(plan)` runs on each rank of our worker; None: the framework brings its own processes."""
    automatic_on: ClassVar[PlatformName | None] = None
    """The platform on which --engine auto prefers this engine."""
    automatic_if_it_fits: ClassVar[bool] = False
    """Whether --engine auto passes over this engine for a plan that it refuses, instead of reporting the refusal."""
    lacks: ClassVar[frozenset[str]] = frozenset()
    """What of LIMITS it cannot do."""
    known: ClassVar[str | None] = None
    """A package of data/known_versions.yaml, with which this engine is known to train; None: any version will do."""
    dialect: ClassVar[Dialect | None] = None
    """Of the lines of its log; None: a worker writes the steps itself."""
    layers: ClassVar[Implementation | None] = None
    always_shards: ClassVar[bool] = False
    """Whether it always shares weights among the replicas, as fully_shard does."""

    @property
    def runs_worker(self) -> bool:
        """Whether our worker does the training and writes the records."""
        return self.trainer is not None

    @abstractmethod
    def available(self, here: Here) -> str | UserError:
        """Return how it is installed here, or what is missing and how to get it. Heavy packages are never imported."""

    @abstractmethod
    def refusal(self, plan: RunPlan, where: Where) -> UserError | None:
        """Say why this engine cannot run the plan, wherever it is installed; None: it can."""

    def untried(self) -> UserError | None:
        """Refuse a package newer or older than all versions that this engine is known to train with; None: it is neither."""
        package = self.known or ""
        oldest, *others, newest = document(DATA / "known_versions.yaml").get(package, ["", ""])
        installed = package_version(package) if package else None
        if installed is None or release(oldest) <= release(installed) <= release(newest):
            return None
        what = f"{package} {installed} is too {'new' if release(installed) > release(newest) else 'old'}."
        why = f"This engine is known to train with {', '.join((oldest, *others))} and {newest}."
        fix = f"pip install {package}=={newest}; --force starts it anyway"
        return LaunchError(what, why=why, fix=fix)

    def refusal_of_layout(self, plan: RunPlan, where: Where, code: Implementation) -> UserError | None:
        """Return the part of `refusal` that depends on how the plan divides model and batch. Searches leave out what it refuses.

        `code` is what the engine's layers are where the plan runs.
        """
        return None

    @abstractmethod
    def command(self, plan: RunPlan) -> Command:
        """Return the exact process that runs the plan. Pure: touches no file and no device."""

    def options(self, plan: RunPlan) -> dict[str, Any]:
        """Return the switches of this engine in a plan."""
        return asdict(plan.engine_options)

    def remark(self, plan: RunPlan) -> str | None:
        """Return what a dry run says of a choice that the engine makes by itself; None: nothing."""
        return None

    def implementation(self, shape: ModelShape, options: Options, transformer_engine: Version = None) -> Implementation | None:
        """Return how the engine's layers use memory on a GPU under its switches, for predictions; None: not known."""
        return self.layers

    def read_line(self, text: str) -> LineFields | None:
        """Parse one line of the log; None for a line without information."""
        return None if self.dialect is None else self.dialect.read_line(text)

    def prepare(self, here: Here | None) -> PrimusStart | None:
        """Look up what the plan must record about the installation; None: about the usual one of another machine."""
        return None

    def software(self, plan: RunPlan) -> dict[str, str]:
        """Return package versions for the first record, by default this Python's. A worker replaces them with what it finds."""
        return software_versions()

    def error_logs(self, plan: RunPlan) -> tuple[str, ...]:
        """Return glob patterns of files with tracebacks that do not reach the console."""
        return ()


def engine_named(name: str) -> Engine:
    """Return the engine with a name."""
    if name not in ENGINE_NAMES:
        raise ConfigError(f"There is no engine {name!r}.", where="--engine", fix=f"one of: {', '.join((AUTO, *ENGINE_NAMES))}")
    engine = import_module(f"tprimat.engines.{name.replace('-', '_')}").ENGINE
    assert isinstance(engine, Engine)
    return engine


def implementation_of(plan: RunPlan, transformer_engine: bool | None = None) -> Implementation | None:
    """Return how the layers of a plan's engine use memory on a GPU; None: not known.

    `transformer_engine` says whether it is installed where the plan runs; None: as here.
    """
    engine = engine_named(plan.engine)
    return engine.implementation(plan.workload.shape, engine.options(plan), transformer_engine)


LOSS_COPIES = (2, 19)
"""The release since which Transformer Engine's loss copies the logits first (overwrite_input of pytorch/cross_entropy.py)."""


def fused_loss(transformer_engine: Version) -> LossKind:
    """Return how Transformer Engine's loss uses memory in a version; not given: the one installed here, or else a new one."""
    version = transformer_engine if isinstance(transformer_engine, str) else package_version("transformer-engine")
    return "in_place" if version and release(version) < LOSS_COPIES else "copied"


def choose(requested: str, here: Here, *, elsewhere: bool = False) -> tuple[Engine, str]:
    """Return the requested engine, or for auto the one that prefers this platform if it is installed, else the embedded one."""
    if requested != AUTO:
        engine = engine_named(requested)
        if not elsewhere and isinstance(error := engine.available(here), UserError):
            raise error
        return engine, "asked for"
    reasons = []
    for engine in map(engine_named, ENGINE_NAMES):
        if engine.automatic_on == here.platform:
            answer = engine.available(here)
            if isinstance(answer, str):
                return engine, answer
            lack = answer.what.removesuffix(".").replace(f"The engine {engine.name}", "it")
            reasons.append(f"{engine.name} is preferred, but {lack}")
    return engine_named(FALLBACK), reasons[0] if reasons else "the only engine that runs on a CPU"


OTHER_ENGINE = f"--engine {FALLBACK}"
OWN_SWITCHES = {"optimizer_states": "fp32", "gradients": "fp32", "fully_shard": False}
"""Switches of the embedded engine that change what is trained -> their usual values."""
LIMITS: Mapping[str, Mapping[str, Any]] = document(DATA / "framework_settings.yaml")["limits"]
"""What an engine may lack -> what tells that a plan wants it, the refusal, and where and how to do without."""


def beyond(engine: Engine, plan: RunPlan, where: Where) -> Iterator[UserError]:
    """Yield an error for each switch of the embedded engine that another one lacks, and for each of its own limits."""
    for name, usual in OWN_SWITCHES.items():
        chosen = getattr(plan.engine_options, name)
        if chosen != usual and not (engine.always_shards and name == "fully_shard"):
            yield ConfigError(
                f"{name} is {'on' if chosen is True else chosen}.",
                where=where("platform_optimizations", plan.platform, "engine_options", name),
                why=f"The engine {engine.name} has no such switch.",
                fix=f"{name}: {str(usual).lower()}, or {OTHER_ENGINE}",
            )
    yield from beyond_limits(engine, plan)


def beyond_limits(engine: Engine, plan: RunPlan) -> Iterator[UserError]:
    """Yield an error for each of an engine's own limits that a plan goes beyond."""
    for name, limit in LIMITS.items():
        if name in engine.lacks and attrgetter(limit["field"])(plan) not in limit["without"]:
            what = f"The engine {engine.name} {limit['what'].format(plan=plan)}."
            yield LaunchError(what, where=limit["where"], fix=limit["fix"].format(other=OTHER_ENGINE))


# Engines whose training runs in our own worker under torchrun and writes its own records.

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = {"llama": "pretrain_llama.py", "qwen": "pretrain_qwen.py"}
"""Model -> its training script at the top of a checkout. Other models, and an installed package, use the module."""
IN_A_CHECKOUT = all((ROOT / name).is_file() for name in SCRIPTS.values())


def start_command() -> tuple[str, ...]:
    """Return the words that start ./benchmark.py with this Python, on any machine that has the same checkout or package."""
    return (sys.executable, str(ROOT / "benchmark.py")) if IN_A_CHECKOUT else (sys.executable, "-m", "tprimat", "run")


WORKER_MODULES = ("torch", "megatron.core", "numpy")
ANY_LIGHTNING = "pytorch_lightning or lightning"
INSTALL = "make install, or pip install -r requirements.txt"


def require_worker_modules() -> None:
    """Check that this Python has what the worker needs, without importing it."""
    missing = [name for name in (*WORKER_MODULES, ANY_LIGHTNING) if not is_installed(name)]
    if missing:
        what = f"The Python module {missing[0]} is not installed for {sys.executable}."
        raise LaunchError(what, why="Training needs it.", fix=INSTALL)


def is_installed(name: str) -> bool:
    """Return whether a module, or one of several, can be found. Only parent packages are imported."""
    try:
        return any(one in sys.modules or find_spec(one) is not None for one in name.split(" or "))
    except ModuleNotFoundError:  # of a parent package
        return False


def release(version: str) -> tuple[int, ...]:
    """Return the major and the minor number of a version."""
    return tuple(int(part) for part in version.split(".")[:2])


class WorkerEngine(Engine):
    """A framework that our worker drives."""

    clock: ClassVar[Literal["step_end", "framework"]] = "step_end"

    def command(self, plan: RunPlan) -> Command:
        """Return the training script of the plan's model, to run once on each rank."""
        arguments = ("--plan", str(RunDirectory(Path(plan.run_directory)).plan_file))
        name = SCRIPTS.get(plan.model) if IN_A_CHECKOUT else None
        script = (str(ROOT / name),) if name else ("-m", "tprimat.train.worker")
        return Command(
            argv=(*script, *arguments),
            ranks_per_node=plan.gpus_per_node,
            environment=plan.environment,
            directory=str(ROOT) if IN_A_CHECKOUT and not name else None,
        )


class RecipesEngine(WorkerEngine):
    """A framework of NVIDIA whose own recipes our worker trains."""

    automatic_on: ClassVar[PlatformName | None] = "nvidia"
    automatic_if_it_fits: ClassVar[bool] = True
    title: ClassVar[str]
    install: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    """Modules that the recipes and their layers import."""

    def available(self, here: Here) -> str | UserError:
        """Look for the modules that the recipes import."""
        if missing := ", ".join(name for name in self.needs if not is_installed(name)):
            what = f"The engine {self.name} needs {missing}, not installed here."
            return LaunchError(what, where=sys.executable, why="Its recipes import it.", fix=self.install)
        return f"{self.title} is installed"


def beyond_recipes(shape: ModelShape) -> dict[str, bool]:
    """Return features that no recipe of NeMo or Bridge can be told, in the words of config.yaml -> whether a shape has them."""
    return {
        f"norm: {shape.norm}": shape.norm != "rmsnorm",
        f"position: {shape.position}": shape.position != "rope",
        "gated: false": not shape.gated,
        "linear_bias: true": shape.linear_bias,
        f"shared_experts: {shape.shared_experts}": bool(shape.shared_experts),
        f"dense_first_layers: {shape.dense_first_layers}": shape.experts is not None and shape.dense_first_layers > 0,
        f"kv_lora_rank: {shape.kv_lora_rank} (latent attention)": shape.kv_lora_rank is not None,
    }
