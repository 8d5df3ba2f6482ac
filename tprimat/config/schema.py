"""config.yaml as frozen dataclasses, with the documented defaults.

Units: tokens, sequences, seconds, fractions 0..1. Unknown keys are refused by the loader.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict
from pydantic_core import PydanticCustomError

from tprimat.core.accelerators import PlatformName
from tprimat.core.flops import FlopConvention
from tprimat.core.models import ModelShape
from tprimat.core.rows import RefuseUnknownKeys

Precision = Literal["bf16", "fp8", "fp8-blockwise", "mxfp8", "nvfp4", "fp32"]
"""The three with scales of their own for blocks of numbers: bridge and megatron-lm; mxfp8 and nvfp4 from Blackwell on."""
Recompute = Literal["none", "selective", "full"]
RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "shared_experts", "mla_up_proj"]
"""Megatron-Core's names."""
Scalar = bool | int | float | str | None
Size = Literal["full", "tiny"]
Routing = Literal["natural", "balanced"]


def _no_flag(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "Input should be a valid number")
    return value


def _plain_name(name: str) -> str:
    if not 0 < len(name) <= LONGEST_NAME or name.startswith(".") or not name.isprintable() or re.search(r"[/\\]", name):
        message = (
            f"It becomes part of the name of a folder: up to {LONGEST_NAME} characters without slashes, and no dot in front."
        )
        raise PydanticCustomError("name", "{message}", {"message": message})
    return name


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise PydanticCustomError("name", "A variable's name has letters, digits and _, and no digit in front.")
    return name


def _one_line(text: str) -> str:
    if not text or not text.isprintable():
        raise PydanticCustomError("line", "It is one line of text without control characters.")
    return text


LONGEST_NAME = 80
Number = Annotated[float, BeforeValidator(_no_flag)]
"""Any number, but not true, which Python counts as 1."""
Count = Annotated[int, Strict(), Field(ge=1, le=10_000_000)]
"""A whole number from 1; true and 2.0 are not whole numbers."""
WholeNumber = Annotated[int, Strict(), Field(ge=0, le=10_000_000)]
Positive = Annotated[Number, Field(gt=0, le=1e12, allow_inf_nan=False)]
NotNegative = Annotated[Number, Field(ge=0, le=1e12, allow_inf_nan=False)]
Seconds = Annotated[Number, Field(ge=0, le=1e9, allow_inf_nan=False)]
"""Up to 31 years, which every timer can wait."""
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Name = Annotated[str, AfterValidator(_plain_name)]
Variable = Annotated[str, AfterValidator(_variable)]
Line = Annotated[str, AfterValidator(_one_line)]
Flag = Annotated[bool, Strict()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentConfig(RefuseUnknownKeys):
    """Name and seed of a series of runs."""

    name: str = "tprimat"
    description: str = ""
    seed: Annotated[int, Strict(), Field(ge=0, lt=2**53)] = 1234
    """For the weights and the order of the data: every layout gives the same losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformHardware(RefuseUnknownKeys):
    """The ranks of a platform."""

    nodes: Count = 1
    gpus_per_node: Annotated[Count, Field(le=4096)] | Literal["auto"] = "auto"
    """auto: all GPUs of this machine; on a CPU, as many processes as the layout needs and the cores allow."""
    gpus_per_node_when_absent: Count = 8
    """For validate_config.py and --dry-run on a machine without GPUs to count, and on a CPU for configurations to compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig(RefuseUnknownKeys):
    """The platforms that strategies can name."""

    platforms: dict[PlatformName, PlatformHardware] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(RefuseUnknownKeys):
    """One model that --model can name."""

    name: str
    """For people: Llama 3.1 8B."""
    architecture: str | ModelShape
    """A name from the table in tprimat/core/models.py, or a shape spelled out."""
    in_all: Flag = True
    """Part of --model all."""
    nemo_recipe: str | None = None
    """Module under nemo.collections.llm, such as llama31_8b."""
    primus_config: str | None = None
    """Model file under Primus's configs/models/megatron, such as llama3.1_8B."""
    model_size_gb: Positive | None = None
    memory_per_gpu_tp4: Positive | None = None
    memory_per_gpu_tp4_pp2: Positive | None = None
    """These three are of older files: accepted, and not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(RefuseUnknownKeys):
    """The data of a step."""

    dataset: str = "auto"
    """mock, text:PATH, or auto: real text on a CPU, mock on a GPU."""
    micro_batch_size: Count = 1
    global_batch_size: Count = 128
    sequence_length: Count = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig(RefuseUnknownKeys):
    """AdamW, its schedule and clipping."""

    learning_rate: Positive = 1.0e-4
    min_learning_rate: NotNegative = 1.0e-5
    warmup_steps: WholeNumber = 10
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: NotNegative = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: Positive = 1.0e-8
    gradient_clipping: NotNegative = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationConfig(RefuseUnknownKeys):
    """Length of a run."""

    max_steps: Count = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig(RefuseUnknownKeys):
    """The workload: the same for every strategy of a comparison."""

    routing: Routing = "natural"
    """How tokens choose experts, in models that have some: by the router, or forced to be even, unlike any real training."""
    moe_expert_capacity_factor: Positive | None = None
    """Times the mean load of a rank's experts in a micro-batch: choices of an expert beyond it are dropped; null: none are."""
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    duration: DurationConfig = field(default_factory=DurationConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig(RefuseUnknownKeys):
    """How one model is split on one platform under one strategy. Omitted values are derived, stated ones are checked."""

    tensor_model_parallel_size: Count = 1
    pipeline_model_parallel_size: Count = 1
    virtual_pipeline_model_parallel_size: Count | None = None
    context_parallel_size: Count = 1
    expert_model_parallel_size: Count = 1
    sequence_parallel: Flag | Literal["auto"] = "auto"
    """auto: on when tensor_model_parallel_size is over 1."""
    data_parallel_size: Count | None = None
    gradient_accumulation_steps: Count | None = None
    micro_batch_size: Count | None = None
    """Overrides training.data.micro_batch_size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(RefuseUnknownKeys):
    """Switches of the embedded engine for speed and memory.

    The losses change with gradients and optimizer_states, and under fp8 with layers and fp8_scaling.
    """

    layers: Literal["local", "transformer_engine"] = "local"
    """Build the layers from our modules, or from NVIDIA's Transformer Engine as Megatron-LM does; then each `auto` below is
    what Megatron-LM runs."""
    accumulate_weight_gradients: Flag | Literal["auto"] = "auto"
    """Add weight gradients straight into the fp32 buffer; auto: on a GPU whose torch can."""
    overlap_tensor_parallel: Flag | Literal["auto"] = "auto"
    """Under sequence parallelism, multiply one piece while another travels, in our own layers on NVIDIA GPUs of one machine that
    read each other's memory; elsewhere it is off."""
    cuda_graphs: Flag | Literal["auto"] = "auto"
    """Launch the passes of each micro-batch as one CUDA graph, in a pipeline each pass, for micro-batches so short that the GPU
    waits for the host; auto: for layouts of which a record shows a gain (data/cuda_graphs.yaml)."""
    distributed_optimizer: Flag = True
    fully_shard: Flag = False
    """Split weights, gradients and optimizer states over the replicas; each layer is gathered to compute (ZeRO-3, FSDP2)."""
    balanced_stages: Flag = True
    """Give the last pipeline stage fewer layers, because its output layer costs as much as several; off: equal numbers."""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """How gradients are summed up over micro-batches and replicas. bf16: 2 bytes per weight less, and half the traffic."""
    optimizer_states: Literal["fp32", "bf16"] = "fp32"
    """bf16: gradients and Adam's moments in bf16 and no fp32 masters, 8 bytes per weight instead of 18; on one rank only, and
    only for measuring: small updates are lost."""
    fp8_scaling: Literal["delayed", "current"] = "delayed"
    """For Transformer Engine under precision fp8: how tensors are scaled into range, by their past or by their present values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimusOptions(RefuseUnknownKeys):
    """Settings of the engine primus besides the plan."""

    overrides: dict[str, Scalar] = field(default_factory=dict)
    """More keys of Primus's pre_trainer module, such as use_turbo_attention; not those that the plan decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NemoOptions(RefuseUnknownKeys):
    """What can be changed in a NeMo recipe, under NeMo's names; both change the losses slightly. None: the recipe's value."""

    cross_entropy_fusion_impl: Literal["native", "te"] | None = None
    """native: Megatron-Core's, with whole logits in fp32. te: Transformer Engine's, which writes the gradient over the logits."""
    first_last_layers_bf16: Flag | None = None
    """Leave the first and the last layer in bf16, as the recipe for fp8 with current scaling does; false: all layers in fp8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeOptions(RefuseUnknownKeys):
    """For the engine bridge."""

    recipe: Annotated[str, Field(pattern=r"^(perf_)?recipes(\.\w+)+:\w+$")] | None = None
    """MODULE:FUNCTION below megatron.bridge, such as
    perf_recipes.llama.h100.llama3:llama3_8b_pretrain_8gpu_h100_bf16_config; None: the plain recipe of this kind of model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformOptimizations(RefuseUnknownKeys):
    """Choices that differ between platforms."""

    precision: Precision = "bf16"
    recompute: Recompute = "none"
    recompute_modules: Annotated[tuple[RecomputeModule, ...], Field(min_length=1)] | None = None
    """What recompute: selective computes again; None: core_attn."""
    recompute_layers: Count | None = None
    """Under recompute: full, how many first layers of each pipeline stage, or of each chunk of one; None: all of them."""
    engine_options: EngineOptions = field(default_factory=EngineOptions)
    environment: dict[Variable, str] = field(default_factory=dict)
    """Variables for the framework's processes, such as NCCL_*."""
    primus: PrimusOptions = field(default_factory=PrimusOptions)
    nemo: NemoOptions = field(default_factory=NemoOptions)
    bridge: BridgeOptions = field(default_factory=BridgeOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSchedule(RefuseUnknownKeys):
    """Steps in torch.profiler's terms."""

    wait: WholeNumber = 1
    warmup: WholeNumber = 1
    active: Count = 5
    repeat: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingConfig(RefuseUnknownKeys):
    """The Kineto profiler on rank 0."""

    enabled: Flag = False
    export_chrome_trace: Flag = True
    profile_memory: Flag = True
    with_stack: Flag = False
    with_flops: Flag = False
    record_shapes: Flag = True
    schedule: ProfileSchedule = field(default_factory=ProfileSchedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkingConfig(RefuseUnknownKeys):
    """How runs are measured and separated."""

    flops_convention: FlopConvention = "causal"
    warmup_steps: WholeNumber | Literal["auto"] = "auto"
    """Steps excluded at the start; auto: found in the data by change-point detection."""
    cooldown_seconds: Seconds | Literal["auto"] = "auto"
    """Between runs and models; auto: 20 on a GPU, 0 on a CPU."""
    meeting_timeout_seconds: Annotated[Seconds, Field(gt=0)] = 60.0
    """Until all nodes of a run have started the command."""
    startup_timeout_seconds: Annotated[Seconds, Field(gt=0)] = 900.0
    """Until the first step ends."""
    hang_factor: Positive = 10.0
    """A run without a new step for this many median steps (and at least hang_minimum_seconds) is hung."""
    hang_minimum_seconds: Seconds = 120.0
    run_timeout_seconds: Annotated[Seconds, Field(gt=0)] | None = None
    cloud_costs: dict[str, Positive] = field(default_factory=dict)
    """Accelerator name -> price of one GPU hour, in your currency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions(RefuseUnknownKeys):
    """How --launcher slurm asks for nodes."""

    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    time: Line | None = None
    """The job's limit in SLURM's form, such as "02:00:00"; quote it, or YAML reads a number."""
    exclusive: Flag = True
    """Do not share the nodes: other jobs would disturb the measurement."""
    arguments: tuple[Line, ...] = ()
    """More options of sbatch, such as [--mem=0]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(RefuseUnknownKeys):
    """The scheduler that --launcher can hand runs to."""

    slurm: SlurmOptions = field(default_factory=SlurmOptions)


Strategy = dict[Name, dict[PlatformName, LayoutConfig]]
"""Model key -> platform -> layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RefuseUnknownKeys):
    """All of config.yaml."""

    experiment: ExperimentConfig = field(default_factory=ExperimentConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    models: dict[Name, ModelConfig]
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: dict[Name, Strategy]
    platform_optimizations: dict[PlatformName, PlatformOptimizations] = field(default_factory=dict)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    benchmarking: BenchmarkingConfig = field(default_factory=BenchmarkingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
