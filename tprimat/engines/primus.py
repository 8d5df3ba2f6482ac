"""Primus, AMD's training framework over Megatron: a generated experiment file and the launcher that starts it.

Sources: AMD-AGI/Primus, v0.2.0 to v26.5.1: runner/primus-cli*.sh, examples/run_pretrain.sh, and the key names of
primus/configs/modules/megatron/*.yaml and primus/configs/models/megatron/*.yaml. tools/check_primus.py checks the settings with a
checkout's own parser.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import ClassVar

import yaml

from tprimat.core.errors import ConfigError, LaunchError, UserError
from tprimat.core.implementations import TRANSFORMER_ENGINE, Implementation
from tprimat.core.workload import ATTENTION_ALONE
from tprimat.engines.base import Availability, Command, Engine, Here, Settings, Where, refuse_own_switches
from tprimat.logs.fields import LineFields
from tprimat.logs.formats import primus as log_format
from tprimat.plan.schema import PlatformName, PrimusOptions, PrimusStart, RunPlan, Scalar

# A plan as Primus's settings: the keys of its pre_trainer module, the experiment file and command-line overrides. Megatron
# accepts some keys and then recomputes them; for those the key that has an effect is used, such as
# `num_virtual_stages_per_pipeline_rank`.

WORK_GROUP = "tprimat"
USER_NAME = "benchmark"
MODULE = "pre_trainer"

Value = Scalar | Sequence[Scalar]

RECOMPUTE: Mapping[str, tuple[str | None, str | None, int | None]] = {
    "none": (None, None, None),
    "selective": ("selective", None, None),
    "full": ("full", "uniform", 1),
}
"""Our setting -> granularity, method, layers. Megatron refuses full recomputation without a method."""

SAFE = re.compile(r"[\w./:@%+,=-]+")
"""run_pretrain.sh, and primus-cli at v0.5.0, pass their arguments through eval unquoted."""

MEASURING: Mapping[str, Value] = {
    "stderr_sink_level": "DEBUG",  # from v26.2 on the iteration lines are debug messages
    "log_interval": 1,
    "log_throughput": True,
    "log_avg_skip_iterations": 2,
    "log_avg_reset_interval": 50,
    "use_rocm_mem_info": False,  # rocm-smi in every iteration would be part of the time
    "use_rocm_mem_info_iters": [1, 2],
    "profile": False,
    "disable_tensorboard": True,
    "disable_wandb": True,
}
DATA: Mapping[str, Value] = {
    "mock_data": True,
    "train_data_path": None,
    "valid_data_path": None,
    "test_data_path": None,
    "eval_iters": 0,
}
NO_CHECKPOINTS: Mapping[str, Value] = {
    "finetune": False,
    "auto_continue_train": False,
    "load": None,
    "save": None,
    "disable_last_saving": True,
}


def settings(plan: RunPlan) -> dict[str, Value]:
    """Return the settings that the plan decides, for the experiment file and for the command line, which takes precedence.

    Raises:
        LaunchError: Primus cannot run the plan.
    """
    refuse_unsupported(plan)
    shape, layout, batch, options = plan.workload.shape, plan.workload.layout, plan.workload, plan.engine_options
    granularity, method, layers = RECOMPUTE[plan.workload.recompute]
    if plan.workload.recompute_layers is not None:
        method, layers = "block", plan.workload.recompute_layers
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "group_query_attention": shape.kv_heads != shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        **_experts(plan),
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "num_virtual_stages_per_pipeline_rank": layout.virtual_pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "sequence_parallel": layout.sequence_parallel,
        "use_distributed_optimizer": options.distributed_optimizer,
        "overlap_grad_reduce": True,
        "overlap_param_gather": options.distributed_optimizer,
        "micro_batch_size": batch.micro_batch_sequences,
        "global_batch_size": batch.global_batch_sequences,
        "seq_length": batch.sequence_tokens,
        "max_position_embeddings": batch.sequence_tokens,
        "train_iters": plan.steps,
        "seed": plan.seed,
        **_optimizer(plan),
        "bf16": plan.workload.matmul_dtype != "fp32",
        "fp16": False,
        "fp8": "hybrid" if plan.workload.matmul_dtype == "fp8" else None,
        "recompute_granularity": granularity,
        "recompute_method": method,
        "recompute_num_layers": layers,
    }


def _experts(plan: RunPlan) -> dict[str, Value]:
    """Return the settings of a mixture of experts; nothing for a dense model.

    Under expert parallelism each expert is whole on its rank. Without it experts are split over the tensor-parallel ranks, which
    is Megatron-Core's default: it would not sum the gradients of whole experts over ranks with different tokens.
    """
    shape = plan.workload.shape
    if shape.experts is None:
        return {}
    return {
        "num_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "expert_tensor_parallel_size": 1 if plan.workload.layout.expert > 1 else plan.workload.layout.tensor,
        "moe_router_force_load_balancing": plan.workload.routing == "balanced",
        "moe_expert_capacity_factor": plan.workload.expert_capacity_factor,
    }


def _optimizer(plan: RunPlan) -> dict[str, Value]:
    """Return the embedded engine's schedule. Megatron requires the warm-up to be shorter than the decay, even in a short run."""
    requested = plan.optimizer
    warmup = min(requested.warmup_steps, plan.steps - 1)
    return {
        "lr": float(requested.learning_rate),
        "min_lr": float(requested.min_learning_rate),
        "lr_warmup_init": 0.0 if requested.warmup_steps == 0 else requested.learning_rate / (requested.warmup_steps + 1),
        "lr_warmup_iters": warmup,
        "lr_decay_iters": plan.steps,
        "lr_decay_style": requested.schedule,
        "weight_decay": float(requested.weight_decay),
        "adam_beta1": float(requested.beta1),
        "adam_beta2": float(requested.beta2),
        "adam_eps": float(requested.epsilon),
        "clip_grad": float(requested.gradient_clipping),
    }


def refuse_unsupported(plan: RunPlan) -> None:
    """Refuse what has no counterpart in Primus, before anything is written."""
    if plan.primus_config is None:
        where = f"models.{plan.model}.primus_config"
        raise LaunchError(f"The model {plan.model} has no Primus model file.", where=where, fix=f"{where}: llama3.1_8B")
    if plan.size != "full":
        why = "Its vocabulary comes from the published tokenizer; TPrimat's small model has another one."
        raise LaunchError(
            "Primus trains the full model only.", where="--set size", why=why, fix="--set size=full, or --engine megatron"
        )
    if plan.dataset != "mock":
        raise LaunchError(
            f"The engine primus trains on mock data, not on {plan.dataset}.", where="--set data", fix="--set data=mock"
        )
    if plan.profiling.enabled:
        raise LaunchError("The engine primus does not profile.", where="profiling.enabled", fix="--engine megatron")
    if (modules := plan.workload.recompute_modules or ATTENTION_ALONE) != ATTENTION_ALONE:
        raise LaunchError(
            f"The engine primus is not told to recompute {', '.join(modules)}.",
            where="platform_optimizations.amd.recompute_modules",
            why="Its log does not say which modules it recomputed.",
            fix="recompute_modules: null, or recompute: full, or --engine megatron",
        )


def experiment(plan: RunPlan) -> dict[str, object]:
    """Return the whole experiment file. What the plan does not decide keeps the value of Primus's preset for the model.

    Raises:
        ConfigError: an additional key contradicts the plan or has no effect.
    """
    decided: dict[str, Value] = {**settings(plan), **DATA, **NO_CHECKPOINTS, **MEASURING}
    additional = plan.primus.overrides if plan.primus else {}
    for key in additional:
        refuse_key(key, decided)
    module = {
        "framework": "megatron",
        "config": "pre_trainer.yaml",
        "model": f"{plan.primus_config}.yaml",
        "overrides": {**decided, **additional},
    }
    return {
        "work_group": WORK_GROUP,
        "user_name": USER_NAME,
        "exp_name": plan.run_id,
        "workspace": str(workspace(plan)),
        "modules": {MODULE: module},
    }


INSTEAD: Mapping[str, str] = {
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size in the strategy of parallelism",
    "data_parallel_size": "--gpus; the data-parallel degree is what is left over",
    "world_size": "--gpus",
    "padded_vocab_size": "make_vocab_size_divisible_by",
    "consumed_train_samples": "nothing; a benchmark starts at its first step",
}
"""Keys that Megatron's validate_args always overwrites -> what to set instead."""


def refuse_key(key: str, decided: Mapping[str, Value]) -> None:
    """Refuse a user's key that the plan decides already or that has no effect."""
    where = f"platform_optimizations.amd.primus.overrides.{key}"
    if key in decided:
        why = "One setting in two places could contradict itself."
        raise ConfigError(f"{key} is decided by the plan.", where=where, why=why, fix="the flag or the key of config.yaml")
    if key in INSTEAD:
        raise ConfigError(f"{key} has no effect in Primus.", where=where, why="Megatron computes it anew.", fix=INSTEAD[key])


def experiment_text(plan: RunPlan) -> str:
    """Return the experiment file as text. PyYAML writes every float with a dot; it would read 1e-05 back as a string."""
    heading = f"# The experiment of run {plan.run_id}, generated from plan.json beside it.\n"
    return heading + yaml.safe_dump(experiment(plan), sort_keys=False, width=200)


def overrides(plan: RunPlan) -> tuple[str, ...]:
    """Return the plan's settings as pairs of arguments: the core runtime of v0.7.0 keeps the dashes of '--key=value'.

    None appears in the experiment only: v0.6.0 to v26.2 read the word None as text.
    """
    given = ((key, value) for key, value in settings(plan).items() if value is not None)
    return tuple(text for key, value in given for text in (f"--{key}", word(value)))


def word(value: Value) -> str:
    """Format a value so that all of Primus's parsers read it back.

    v0.2.0 to v0.5.0 evaluate Python, so booleans are True and False; later versions require a dot in a float.
    """
    if isinstance(value, float):
        text = repr(value)
        mantissa, exponent, power = text.partition("e")
        return text if "." in mantissa else f"{mantissa}.0{exponent}{power}"
    return str(value)


def workspace(plan: RunPlan) -> PurePath:
    """Return the folder for Primus's own output."""
    return PurePath(plan.run_directory) / "primus"


# Where Primus is installed, and how it is started.

DIRECT = "runner/primus-cli-direct.sh"
"""Exists since v0.5.0, when primus-cli got its modes; v0.4.0 has a primus-cli without them."""
GIT_TIMEOUT_SECONDS = 10.0
"""--dirty compares every file, which is slow on a network file system."""
SLURM_ENTRY = "runner/primus-cli-slurm-entry.sh"
WITHOUT_CONTAINER = re.compile(r"primus-cli-\$\{\w*MODE\}\.sh")
"""Found in the entry script of versions that can run without a container; v0.7.0 to v26.4.0 cannot."""
CLI = ("primus-cli", "runner/primus-cli")
"""At the root since v26.2."""
SCRIPT = "examples/run_pretrain.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """A Primus checkout or package."""

    place: str
    """As found, for messages."""
    root: Path | None
    """The checkout's root; None for an installed package."""
    cli: Path | None
    """primus-cli with its modes."""
    script: Path | None
    """run_pretrain.sh, which every version has."""


def find_primus(primus_path: str | None) -> str | None:
    """Return the user's Primus checkout, or the primus-cli on PATH."""
    if primus_path and Path(primus_path).is_dir():
        return primus_path
    return shutil.which("primus-cli")


def look(primus_path: str | None) -> Installation:
    """Inspect the user's checkout, or the primus-cli on PATH and the checkout around it.

    Raises:
        LaunchError: there is neither.
    """
    place = find_primus(primus_path)
    if place is None:
        raise LaunchError("Primus was not found.", fix="export PRIMUS_PATH=/path/to/Primus, or put primus-cli on PATH")
    found = Path(place).resolve()
    folders = [one for one in found.parents[:2] if (one / "runner").is_dir() and (one / "primus").is_dir()]
    around = [found] if found.is_dir() else folders
    if not around:
        return Installation(place=place, root=None, cli=Path(place).absolute(), script=None)
    root = around[0]
    cli, script = (next((root / name for name in names if (root / name).is_file()), None) for names in (CLI, (SCRIPT,)))
    return Installation(place=place, root=root, cli=cli if (root / DIRECT).is_file() else None, script=script)


def find_installation(options: PrimusOptions, primus_path: str | None, nodes: int) -> PrimusStart:
    """Decide how to start Primus on this machine.

    Raises:
        LaunchError: Primus is missing, its version lacks the launcher, or the launcher cannot be measured on several nodes.
    """
    found = look(primus_path)
    launcher = ("direct" if found.cli else "script") if options.launcher == "auto" else options.launcher
    program = found.script if launcher == "script" else found.cli
    if program is None:
        wanted = SCRIPT if launcher == "script" else DIRECT
        what = f"The Primus at {found.place} has no {wanted}."
        why = "primus-cli has its modes since v0.5.0." if launcher != "script" else "It belongs to a checkout."
        raise LaunchError(what, why=why, fix="PRIMUS_PATH with a checkout, or platform_optimizations.amd.primus.launcher: auto")
    if nodes > 1 and launcher != "slurm":
        raise LaunchError(
            f"Primus on {nodes} nodes is measured with the launcher slurm only.",
            why="The first node prints what runs, the last one how fast: one node's log proves nothing. srun joins the logs.",
            fix="--set platform_optimizations.amd.primus.launcher=slurm",
        )
    if launcher == "slurm":
        _check_slurm(options, found)
    return PrimusStart(
        program=str(program),
        launcher=launcher,
        directory=str(found.root) if found.root else None,
        version=version_of(found.root) if found.root else None,
        image=options.image,
        slurm_arguments=options.slurm_arguments,
        overrides=options.overrides,
    )


def version_of(root: Path) -> str | None:
    """Return tag and commit of a checkout, such as v26.5.1-3-gfd1eeabb; None if git or its history is missing."""
    if not (root / ".git").exists():  # git would search the parent folders
        return None
    argv = ["git", "-C", str(root), "describe", "--tags", "--always", "--dirty"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=GIT_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _check_slurm(options: PrimusOptions, found: Installation) -> None:
    if shutil.which("srun") is None:
        raise LaunchError("The launcher slurm needs srun, which is not on PATH.", fix="start inside a SLURM cluster")
    entry = found.root / SLURM_ENTRY if found.root else None
    if options.image is None and entry and entry.is_file() and not WITHOUT_CONTAINER.search(entry.read_text(encoding="utf8")):
        what = f"The Primus at {found.place} starts a container under slurm, and no image is named."
        why = "Versions v0.7.0 to v26.4.0 cannot run without a container."
        raise LaunchError(what, why=why, fix="--set platform_optimizations.amd.primus.image=rocm/primus:VERSION")


# The engine.

MASTER_PORT = "29500"
"""torch.distributed's own. Primus's is 1234, below the ports that are free for everyone."""


class PrimusEngine(Engine):
    """Starts Primus and reads its console."""

    name: ClassVar[str] = "primus"
    starts_nodes: ClassVar[bool] = True
    automatic_on: ClassVar[PlatformName | None] = "amd"

    def implementation(self, settings: Settings) -> Implementation | None:
        """Transformer Engine's layers, with its loss, as the settings for MI300X ask."""
        return replace(TRANSFORMER_ENGINE, loss="in_place")

    def available(self, here: Here) -> Availability:
        """Look for the user's checkout, or for primus-cli on PATH."""
        path = here.primus_path
        if (found := find_primus(path)) is not None:
            return Availability(reason=f"Primus is at {found}")
        what = f"There is no folder {path} (PRIMUS_PATH)." if path else "Primus was not found."
        fix = "export PRIMUS_PATH=/path/to/Primus, or put primus-cli on PATH; or --engine megatron"
        error = LaunchError(what, why="The engine primus starts AMD's Primus.", fix=fix)
        return Availability(reason="Primus was not found", error=error)

    def refusal(self, plan: RunPlan, where: Where) -> UserError | None:
        """Refuse what has no counterpart in Primus, and keys that contradict the plan."""
        if refused := refuse_own_switches(self.name, plan, where):
            return refused
        try:
            self.command(plan)
        except UserError as error:
            return error
        return None

    def prepare(self, here: Here | None) -> PrimusStart:
        """Find out which Primus is installed and how to start it."""
        if here is None:
            return PrimusStart(program=DIRECT, launcher="direct")
        return find_installation(here.primus, here.primus_path, here.nodes)

    def software(self, plan: RunPlan) -> dict[str, str]:
        """Return the version of the checkout."""
        return {self.name: plan.primus.version} if plan.primus and plan.primus.version else {}

    def error_logs(self, plan: RunPlan) -> tuple[str, ...]:
        """Return the pattern of all ranks' tracebacks; primus-cli hides those of most ranks from the console."""
        folder = workspace(plan) / WORK_GROUP / USER_NAME / plan.run_id
        return (str(folder / "logs" / MODULE / "rank-*" / "error.log"),)

    def command(self, plan: RunPlan) -> Command:
        """Return the launcher with the generated experiment and every setting of the plan.

        Raises:
            LaunchError: the plan has no Primus to start, or asks for what Primus cannot do.
            ConfigError: an additional key contradicts the plan.
        """
        start = plan.primus
        if start is None:
            raise LaunchError("The plan does not say which Primus to start.", fix="plan again with --engine primus")
        refuse_unsafe(plan, start)
        experiment = str(PurePath(plan.run_directory) / "primus.yaml")
        environment = {**plan.environment, **_environment(plan, start)}
        if start.launcher == "script":
            environment["EXP"] = experiment
            environment["TRAIN_LOG"] = own_log(plan)
            argv: tuple[str, ...] = ("bash", start.program, *overrides(plan))
        else:
            training = ("train", "pretrain", "--config", experiment, *overrides(plan))
            argv = (start.program, *_launcher(plan, start, environment), "--", *training)
        return Command(argv=argv, environment=environment, directory=start.directory, files={experiment: experiment_text(plan)})

    def read_line(self, text: str) -> LineFields | None:
        """Parse one line of the console."""
        return log_format.DIALECT.read_line(text)


def _environment(plan: RunPlan, start: PrimusStart) -> dict[str, str]:
    """Set what Primus would otherwise take from its surroundings, such as an enclosing SLURM job."""
    found = {"PRIMUS_EXP_NAME": plan.run_id, "GPUS_PER_NODE": str(plan.gpus_per_node), "MASTER_PORT": MASTER_PORT}
    if start.launcher != "slurm":
        found |= {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    return found


def _launcher(plan: RunPlan, start: PrimusStart, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words before '-- train pretrain'. Under slurm the nodes' mode follows srun's own words."""
    if start.launcher == "direct":
        return ("direct", "--log_file", own_log(plan))
    if start.launcher == "container":
        return ("container", *_container(plan, start, environment))
    srun = ("slurm", "srun", "-N", str(plan.nodes), *start.slurm_arguments, "--")
    # Primus's entry script on the nodes adds the rendezvous and reads the number of GPUs from srun's environment.
    passed_on = {name: value for name, value in environment.items() if name not in {"GPUS_PER_NODE", "MASTER_PORT"}}
    # v0.7.0 to v26.4.0 take no mode here and always start a container; later versions do so when no mode is given.
    return (*srun, *_container(plan, start, passed_on)) if start.image else (*srun, "direct")


def _container(plan: RunPlan, start: PrimusStart, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Mount the output folder at the same path and pass the environment. Primus mounts its checkout and the GPUs itself.

    --init makes a process that handles SIGTERM the container's first: the shell that Primus starts ignores it, so a stopped run
    would continue inside its container.
    """
    image = ("--image", start.image) if start.image else ()
    volume = ("--volume", f"{plan.output_directory}:{plan.output_directory}")
    return ("--init", *image, *volume, *(word for name, value in environment.items() for word in ("--env", f"{name}={value}")))


def own_log(plan: RunPlan) -> str:
    """Return the path for the launcher's copy of the console; the default path is shared by all runs."""
    return str(PurePath(plan.run_directory) / "primus.log")


def refuse_unsafe(plan: RunPlan, start: PrimusStart) -> None:
    """Refuse paths that Primus's launchers, which evaluate their arguments a second time, would break."""
    for name, path in (("output folder", plan.run_directory), ("Primus checkout", start.directory or "")):
        if path and not SAFE.fullmatch(path):
            why = "Primus's launchers pass it through a shell without quotes."
            raise LaunchError(f"The {name} {path!r} holds a space or a sign.", why=why, fix="a path of letters, digits and ._-/")


ENGINE = PrimusEngine()
