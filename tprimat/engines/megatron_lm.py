"""Megatron-LM's pretrain_gpt.py under torchrun: NVIDIA's program, from a clone, or three of its scripts beside pip's package.

Since 0.17 the package has the rest, and compiled helpers of data sets, but not the Makefile by which each start compiles them.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path, PurePath
from typing import ClassVar

from tprimat.core.errors import LaunchError, UserError
from tprimat.core.implementations import TRANSFORMER_ENGINE, Implementation
from tprimat.core.models import ModelShape
from tprimat.core.rows import DATA, document
from tprimat.engines.base import OTHER_ENGINE, Command, Engine, Here, Where, beyond, is_installed
from tprimat.engines.primus import version_of
from tprimat.logs.fields import Dialect
from tprimat.logs.formats.megatron import MEGATRON_LM
from tprimat.plan.megatron_names import Value, parser_arguments, router_fields
from tprimat.plan.schema import RunPlan
from tprimat.records.environment import software_versions

PATH = "MEGATRON_PATH"
SCRIPT = "pretrain_gpt.py"
NEEDED = (SCRIPT, "megatron/core/datasets/Makefile")
SCRIPTS = (SCRIPT, "gpt_builders.py", "model_provider.py")
"""What a folder must have without a Megatron-Core of its own."""
MODULES = {"transformer_engine": "makes its layers of it", "pybind11": "compiles the helpers of data sets with it"}
APEX = "fused_weight_gradient_mlp_cuda"
"""Apex's extension, without which its output layer refuses to add weight gradients to those of earlier micro-batches."""
INSTALL = f"git clone https://github.com/NVIDIA/Megatron-LM, then export {PATH}=/path/to/Megatron-LM; or {OTHER_ENGINE}"


class MegatronLmEngine(Engine):
    """Starts pretrain_gpt.py and reads its console."""

    name: ClassVar[str] = "megatron-lm"
    lacks: ClassVar[frozenset[str]] = frozenset({"cpu", "text", "profiles"})
    dialect: ClassVar[Dialect | None] = MEGATRON_LM
    layers: ClassVar[Implementation | None] = TRANSFORMER_ENGINE
    """With Megatron-Core's loss."""

    def available(self, here: Here) -> str | UserError:
        """Look for the script, for the Python that it needs and for modules that it imports."""
        path, alone = os.environ.get(PATH), _scripts_alone()
        missing = [name for name in (SCRIPTS if alone else NEEDED) if path is None or not (Path(path) / name).is_file()]
        if missing:
            what = f"There is no {missing[0]} in {path}." if path else f"{PATH} names no clone of Megatron-LM."
            return LaunchError(what, where=PATH, fix=INSTALL)
        least = re.search(r'requires-python = ">=(\d+)\.(\d+)', _text_of("pyproject.toml"))
        if least and sys.version_info < (needed := tuple(map(int, least.groups()))):
            what = f"The Megatron-LM at {path} needs Python {'.'.join(map(str, needed))} or newer."
            return LaunchError(what, where=sys.executable, fix=f"another Python, or git checkout core_v0.16.1; or {OTHER_ENGINE}")
        for module, use in MODULES.items():
            if not is_installed(module) and not (alone and module == "pybind11"):
                what, fix = f"The Python module {module} is not installed.", f"pip install {module.replace('_', '-')}"
                return LaunchError(what, where=sys.executable, why=f"{SCRIPT} {use}.", fix=f"{fix}; or {OTHER_ENGINE}")
        return f"Megatron-LM is at {path}"

    def remark(self, plan: RunPlan) -> str | None:
        """Say that a missing package makes the run slower."""
        lacks = PATH in os.environ and not is_installed(APEX)
        return f"gradient accumulation fusion: off, because Apex ({APEX}) is not installed" if lacks else None

    def refusal(self, plan: RunPlan, where: Where) -> UserError | None:
        """Refuse what TPrimat does not tell Megatron-LM, or what it cannot do."""
        return next(chain(beyond(self, plan, where), _refusals(plan)), None)

    def software(self, plan: RunPlan) -> dict[str, str]:
        """Return this Python's packages and the versions of the clone, whose Megatron-Core hides an installed one."""
        core = ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", _text_of("megatron/core/package_info.py"), re.MULTILINE))
        clone = {self.name: version_of(Path(os.environ.get(PATH, ""))), "megatron-core": core}
        return software_versions() | {name: version for name, version in clone.items() if version}

    def command(self, plan: RunPlan) -> Command:
        """Return the script with its arguments, to run once on each rank."""
        script = str(PurePath(os.environ.get(PATH, "Megatron-LM")) / SCRIPT)
        needed = {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron-LM refuses to overlap tensor ranks without it
            # Its Makefile may find another Python's; where there is none, make gets a target that does nothing.
            "MAKEFLAGS": "--eval=all:;@:" if _scripts_alone() else f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}",
        }
        words = (script, *words_of(arguments(plan)))
        return Command(argv=words, ranks_per_node=plan.gpus_per_node, environment={**needed, **plan.environment})


def _scripts_alone() -> bool:
    """Return whether MEGATRON_PATH has no Megatron-Core, and an installed one has megatron/training, as since 0.17."""
    return PATH in os.environ and not (Path(os.environ[PATH]) / "megatron").exists() and is_installed("megatron.training")


def _text_of(name: str) -> str:
    try:
        return (Path(os.environ[PATH]) / name).read_text(encoding="utf8")
    except (KeyError, OSError):
        return ""


def _refusals(plan: RunPlan) -> Iterator[UserError]:
    shape = plan.workload.shape
    if plan.workload.matmul_dtype == "fp32":
        what = "Transformer Engine's layers run in bf16 or fp8."
        yield LaunchError(what, where="--precision", fix=f"--precision bf16, or {OTHER_ENGINE}")
    if shape.kv_lora_rank is not None or shape.shared_experts or shape.dense_first_layers:
        what = f"The engine megatron-lm cannot describe {shape.name}: latent attention, shared experts or dense first layers."
        yield LaunchError(what, where=f"models.{plan.model}", fix=OTHER_ENGINE)


def arguments(plan: RunPlan) -> dict[str, Value]:
    """Return everything that pretrain_gpt.py is told: the plan, the model, and how it is measured."""
    work, settings = plan.workload, document(DATA / "framework_settings.yaml")
    decided = parser_arguments(plan)
    del decided["fp8"]
    return {
        **decided,
        **_model(work.shape),
        **settings["megatron_lm"],
        **(settings["megatron_lm_experts"] if work.shape.experts else {}),
        "no_gradient_accumulation_fusion": PATH in os.environ and not is_installed(APEX),  # another machine may have it
        "vocab_size": work.shape.vocabulary - 1,  # NullTokenizer adds one
        "recompute_modules": work.recompute_modules if work.recompute == "selective" else None,
        **(settings["megatron_lm_scaling"][work.fp8_scaling or plan.engine_options.fp8_scaling] if work.narrow else {}),
    }


def _model(shape: ModelShape) -> dict[str, Value]:
    fields: dict[str, Value] = {
        "normalization": "RMSNorm" if shape.norm == "rmsnorm" else "LayerNorm",
        "norm_epsilon": shape.norm_epsilon,
        "position_embedding_type": "rope" if shape.position == "rope" else "learned_absolute",
        "swiglu": shape.gated,
        "disable_bias_linear": not shape.linear_bias,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "untie_embeddings_and_output_weights": not shape.tied_embeddings,
    }
    if shape.position == "rope":
        fields |= {"rotary_base": int(shape.rope_base), "no_rope_fusion": False}
    if shape.rope_scaling is not None:
        fields |= {"use_rope_scaling": True, "rope_scaling_factor": shape.rope_scaling.factor}
    return fields | router_fields(shape)


def words_of(given: Mapping[str, Value]) -> tuple[str, ...]:
    """Return arguments as words; what is None or False is left out, and so is kept by Megatron-LM's default."""
    words: list[str] = []
    for name, value in given.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]
    return tuple(words)


ENGINE = MegatronLmEngine()
