"""torchtitan, PyTorch's own training framework: its command line, its input files and its log.

Argument names are those of torchtitan 0.2.2 (torchtitan/config/job_config.py). Since 0.3 a module names the configuration, which
holds objects that a command line cannot say: `titan_config` below (torchtitan/config/manager.py). Its parallelism is FSDP2 and
DTensor, not Megatron-Core: the replicas of a plan share weights, gradients and optimizer states, and tensor parallelism always
splits the sequence too.
"""

import json
import os
import random
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, ClassVar

from tprimat.core.errors import LaunchError, UserError
from tprimat.core.implementations import FSDP, Implementation
from tprimat.core.models import model_shape
from tprimat.core.rows import DATA, document, placed
from tprimat.engines.base import LIMITS, OTHER_ENGINE, ROOT, Command, Engine, Here, Where, beyond, is_installed, release
from tprimat.logs.fields import Dialect
from tprimat.logs.formats import torchtitan as log_format
from tprimat.plan.schema import RunPlan, read_plan
from tprimat.records.environment import package_version
from tprimat.records.store import RunDirectory

OUR_EXTRA = "0.2.2"
BY_A_MODULE = (0, 3)
"""The first version whose configuration a module names."""
LEAST_TORCH = (2, 14)
"""What that version imports of torch.distributed and older ones lack: fsdp.DataParallelMeshDims, set_timeout."""
INSTALL = "pip install '.[torchtitan]'; or --engine megatron"
PLAN = "TPRIMAT_PLAN"
"""Tells `titan_config` where the plan is."""
FLAVORS = {"llama-3.1-8b": "8B", "llama-3.1-405b": "405B"}
"""Shape -> flavor of torchtitan's model llama3. Qwen 2.5 has biases, which none of its dense models has."""
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp8": "bfloat16"}
"""Our precision -> the type of the weights in a product. fp8 replaces the linear layers on top of it."""
RECOMPUTE = {"none": "none", "full": "full"}
"""Megatron's selective recomputation covers the core of attention, torchtitan's every second layer."""
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "linear"}
"""constant: a linear decay that ends at the learning rate itself."""

DATASET, TOKENIZER = "c4_test", "tokenizer"
"""What torchtitan reads of the files below."""
WORDS, TEXTS, WORDS_PER_TEXT = 30_000, 800, 700


class TorchtitanEngine(Engine):
    """Starts torchtitan.train under torchrun and reads its log."""

    name: ClassVar[str] = "torchtitan"
    lacks: ClassVar[frozenset[str]] = frozenset(LIMITS)
    """Its device is one of torch's list of accelerators, without which it falls back on CUDA (tools/utils.py)."""
    always_shards: ClassVar[bool] = True
    known: ClassVar[str | None] = "torchtitan"
    dialect: ClassVar[Dialect | None] = log_format.DIALECT
    layers: ClassVar[Implementation | None] = FSDP

    def available(self, here: Here) -> str | UserError:
        """Look for the package."""
        if not is_installed(self.name):
            return LaunchError("torchtitan is not installed.", why="The engine torchtitan starts it.", fix=INSTALL)
        if installed_version(self.name) >= BY_A_MODULE and installed_version("torch") < LEAST_TORCH:
            titan, torch = package_version(self.name), package_version("torch")
            what = f"torchtitan {titan} needs torch {'.'.join(map(str, LEAST_TORCH))} or newer; torch {torch} is installed."
            why = "It imports names of torch.distributed that older versions lack."
            return LaunchError(what, why=why, fix=f"pip install torchtitan=={OUR_EXTRA}, or a newer torch; or {OTHER_ENGINE}")
        return "torchtitan is installed"

    def refusal(self, plan: RunPlan, where: Where) -> UserError | None:
        """Refuse what torchtitan cannot do, or would do differently from the plan."""
        return next(chain(beyond(self, plan, where), _unsupported_model(plan, where), _unsupported_layout(plan, where)), None)

    def refusal_of_layout(self, plan: RunPlan, where: Where, code: Implementation) -> UserError | None:
        """Refuse how it splits a step differently, in any of its models."""
        return next(_unsupported_layout(plan, where), None)

    def command(self, plan: RunPlan) -> Command:
        """Return torchtitan.train on every rank, with the console of local rank 0 only, and inputs for all runs of a folder."""
        inputs = PurePath(plan.output_directory) / "torchtitan"
        environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(inputs / "huggingface")}
        if by_a_module := installed_version(self.name) >= BY_A_MODULE:
            environment[PLAN] = str(RunDirectory(Path(plan.run_directory)).plan_file)
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return Command(
            argv=("--local-ranks-filter=0", "-m", "torchtitan.train", *arguments(plan, by_a_module=by_a_module)),
            ranks_per_node=plan.gpus_per_node,
            environment={**environment, **plan.environment},
            directory=str(inputs),
            files={str(inputs / name): text for name, text in input_files().items()},
        )


def installed_version(package: str) -> tuple[int, ...]:
    """Return major and minor number of an installed package; of torchtitan where there is none, those of our extra."""
    return release(package_version(package) or OUR_EXTRA)


def _unsupported_model(plan: RunPlan, where: Where) -> Iterator[LaunchError]:
    place = where("models", plan.model, "architecture")
    if plan.workload.shape.name not in FLAVORS:
        why = f"TPrimat runs it only for {', '.join(FLAVORS)}."
        yield LaunchError(f"torchtitan cannot train {plan.workload.shape.name}.", where=place, why=why, fix=OTHER_ENGINE)
    elif plan.workload.shape != model_shape(plan.workload.shape.name):
        yield LaunchError(f"The shape {plan.workload.shape.name} differs from torchtitan's.", where=place, fix=OTHER_ENGINE)
    if plan.optimizer.gradient_clipping == 0:
        key = where("training", "optimizer", "gradient_clipping")
        yield LaunchError("torchtitan always clips gradients.", where=key, fix=f"gradient_clipping: 1.0, or {OTHER_ENGINE}")


def _unsupported_layout(plan: RunPlan, where: Where) -> Iterator[LaunchError]:
    layout, place = plan.workload.layout, where("parallelism", plan.strategy, plan.model, plan.platform)
    if layout.pipeline > 1:
        why = "Its micro-batches are parts of a local batch, so memory and schedule are not those of the plan."
        yield LaunchError("torchtitan's pipeline divides a step differently.", where=place, why=why, fix=OTHER_ENGINE)
    if layout.tensor > 1 and not layout.sequence_parallel:
        what = "torchtitan has no tensor parallelism without sequence parallelism."
        yield LaunchError(what, where=place, fix=f"sequence_parallel: auto, or {OTHER_ENGINE}")
    if layout.tensor > 1 and layout.data * layout.context == 1 and plan.workload.matmul_dtype != "fp32":
        what, why = "torchtitan computes in fp32 with a single replica.", "It lowers precision only where it shards weights."
        yield LaunchError(what, where=place, why=why, fix=f"--gpus {2 * layout.world_size}, or {OTHER_ENGINE}")
    settings = ("platform_optimizations", plan.platform)
    if plan.workload.recompute not in RECOMPUTE:
        what, why = "torchtitan has no recompute: selective like Megatron-Core's.", "Its own skips every second layer."
        yield LaunchError(what, where=where(*settings, "recompute"), why=why, fix="recompute: none or full")
    if plan.workload.recompute_layers is not None:
        place = where(*settings, "recompute_layers")
        yield LaunchError("torchtitan recomputes all layers, or none.", where=place, fix="recompute_layers: null")


def arguments(plan: RunPlan, *, by_a_module: bool = False) -> tuple[str, ...]:
    """Return the plan as torchtitan's command line: compiled, with a log line for every step; with a module, without objects."""
    batch, optimizer = plan.workload, plan.optimizer
    floor = 1.0 if optimizer.schedule == "constant" else optimizer.min_learning_rate / optimizer.learning_rate
    values: dict[str, object] = {
        **placed("torchtitan_names.arguments", plan=plan),
        "--training.mixed_precision_param": DTYPES[batch.matmul_dtype],
        "--lr_scheduler.warmup_steps": min(optimizer.warmup_steps, plan.steps - 1),
        "--lr_scheduler.decay_type": SCHEDULES[optimizer.schedule],
        "--lr_scheduler.min_lr_factor": floor,
        "--metrics.log_freq": 1,
    }
    dump_folder = PurePath(plan.run_directory) / "torchtitan"
    objects: dict[str, object] = {
        "--model.name": "llama3",
        "--model.flavor": FLAVORS[batch.shape.name],
        "--training.dataset": DATASET,
        "--activation_checkpoint.mode": RECOMPUTE[batch.recompute],
        **placed("torchtitan_names.objects", plan=plan),
        **({"--model.converters": "quantize.linear.float8"} if batch.matmul_dtype == "fp8" else {}),
    }
    if by_a_module:
        named: dict[str, object] = {"--module": __name__, "--config": titan_config.__name__}
        values = {**named, "--dump_folder": dump_folder, "--hf_assets_path": TOKENIZER, **values}
        switches = ("--compile.enable", "--debug.print_config")
    else:
        values = {"--job.dump_folder": dump_folder, "--model.hf_assets_path": TOKENIZER, **objects, **values}
        switches = ("--compile.enable", "--job.print_config")
    return (*(str(word) for pair in values.items() for word in pair), *switches)


def titan_config() -> Any:
    """Return torchtitan's own configuration of Llama 3 with what its command line cannot say of the plan in TPRIMAT_PLAN.

    torchtitan 0.3 calls this on each rank, before it reads the other arguments.
    """
    plan = read_plan(Path(os.environ[PLAN]))
    registry, optimizer = import_module("torchtitan.models.llama3.config_registry"), plan.optimizer
    in_fp8 = plan.workload.matmul_dtype == "fp8"
    converters = [registry.Float8LinearConverter.Config(model_compile_enabled=True)] if in_fp8 else None
    config = registry.llama3_8b()
    config.model_spec = registry.model_registry(FLAVORS[plan.workload.shape.name], converters=converters)
    config.optimizer = registry.default_adamw(
        lr=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
    )
    config.activation_checkpoint = registry.FullAC.Config() if plan.workload.recompute == "full" else None
    config.dataloader.dataset = DATASET
    config.profiler.enable_profiling = config.metrics.enable_tensorboard = False
    return config


@cache
def input_files() -> dict[str, str]:
    """Return path -> text of random words where torchtitan looks for its test data, and of a tokenizer with one token a word."""
    noise = random.Random(0)
    words = [f"w{number}" for number in range(WORDS)]
    texts = [json.dumps({"text": " ".join(noise.choices(words, k=WORDS_PER_TEXT))}) for _ in range(TEXTS)]
    special = ["<unk>", "<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer = document(DATA / "torchtitan_names.yaml")["tokenizer"]
    vocabulary = {word: number for number, word in enumerate([*words, *special])}
    settings = {"bos_token": special[1], "eos_token": special[2], "add_bos_token": True, "add_eos_token": True}
    return {
        "tests/assets/c4_test/data.json": "\n".join(texts) + "\n",
        "tokenizer/tokenizer.json": json.dumps({**tokenizer, "model": {**tokenizer["model"], "vocab": vocabulary}}),
        "tokenizer/tokenizer_config.json": json.dumps(settings),
    }


ENGINE = TorchtitanEngine()
