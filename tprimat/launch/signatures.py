"""Texts by which frameworks say why they end, as data. What a text means is decided in failures.py.

Sources: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and c10/cuda/CUDACachingAllocator.cpp (whose CUDA becomes HIP on ROCm),
torch/distributed/elastic, Megatron-LM's megatron/training/arguments.py and rerun_state_machine.py, huggingface_hub/errors.py,
Primus's launcher, the Linux kernel's mm/oom_kill.c, slurmstepd.
"""

import re
from dataclasses import dataclass

from tprimat.record.schema import Outcome


@dataclass(frozen=True, slots=True)
class Signature:
    """One class of failures. The cause may name the groups of the pattern."""

    kind: str
    outcome: Outcome
    pattern: re.Pattern[str]
    cause: str
    hint: str | None


def _signature(kind: str, outcome: Outcome, pattern: str, cause: str, hint: str | None = None) -> Signature:
    return Signature(kind, outcome, re.compile(pattern), cause, hint)


BENIGN = re.compile(
    r"error_injection_rate|destroy_process_group\(\) was not called|in a low-power state|No token throughput"
    r"|^\W*(?:export |declare -x )?(?!HSA_STATUS_ERROR)\w*(?:NCCL|TORCH|PYTORCH|CUDA|HSA|HIP)_\w+\s*[=:]"
    r"|exitcode\s*: -15"
    r"|nan iterations:\s*0\b"
    r"|^Cannot import zarr, support for zarr-based checkpoints"
)
"""Lines that look like trouble and are none."""

GPU_MEMORY = re.compile(
    r"(?:HIP|CUDA) out of memory\. Tried to allocate (?P<size>[\d.]+ [KMGT]?i?B)"
    r"(?:.*?GPU (?P<gpu>\d+) has a total capac?i?ty of (?P<capacity>[\d.]+ [KMGT]?i?B)"
    r" of which (?P<free>[\d.]+ [KMGT]?i?B|\d+ bytes) is free)?"
)

LESS_MEMORY = "lower --micro-batch-size, or set recompute to full"

PRIMARY = (
    _signature("worker_refused", "failed", r"^error: (?P<what>.+)$", "{what}"),
    _signature(
        "out_of_memory",
        "out_of_memory",
        r"(?:HIP|CUDA) out of memory|hipErrorOutOfMemory|(?:CUDA|HIP) error: out of memory"
        r"|NCCL WARN (?:Cuda|HIP) failure.*out of memory"
        r"|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED",
        "The GPU ran out of memory.",
        LESS_MEMORY,
    ),
    _signature(
        "shared_memory",
        "failed",
        r"out of shared memory|DataLoader worker \(pid\(?s?\)? .*killed by signal: Bus error"
        r"|unable to (?:open|write to) .*shared memory",
        "A process that loads data ran out of shared memory (/dev/shm).",
        "docker run --ipc host, or --shm-size 16g; in Kubernetes a larger emptyDir of medium Memory at /dev/shm",
    ),
    _signature(
        "host_out_of_memory",
        "out_of_memory",
        r"Out of memory: Killed process \d+|oom_kill event|oom-kill:"
        r"|DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
        r"|Cannot allocate memory|^(?:\[rank\d+\]: )?MemoryError",
        "The machine ran out of main memory.",
        "use fewer processes, a smaller model size or batch, or a machine (or job) with more main memory",
    ),
    _signature(
        "diverged",
        "diverged",
        r"Unexpected result (?:nan|[-+]?inf)|[Ff]ound (?:NaN|Inf|nan|inf) in"
        r"|\b(?:loss|grad norm):\s*[-+]?(?i:nan|inf(?:inity)?)\b"
        r"|nan iterations:\s*[1-9]",
        "The loss or a gradient is not a finite number any more.",
        "lower the learning rate, lengthen the warm-up, or use bf16 instead of fp8",
    ),
    _signature(
        "bad_configuration",
        "failed",
        r"(?P<text>(?:world size \(\d+\)|num_attention_heads|num_query_groups|Number of layers|number of layers|num_layers"
        r"|global batch size|max_position_embeddings|sequence length|seq_length).*"
        r"(?:divisible by|must be a multiple of|greater than or equal to).*"
        r"|Using recompute_granularity: full so recompute_method must be.*|When interleaved schedule is used.*"
        r"|assert not args\.bf16.*"
        r"|Override key '.*' does not exist.*|TypeError: '<=' not supported between instances of 'float' and 'str'.*"
        r"|unrecognized arguments: .*)",
        "The framework refuses the configuration: {text}",
        "./validate_config.py lists what is valid",
    ),
    _signature(
        "tokenizer",
        "failed",
        r"GatedRepoError|[Cc]annot access gated repo|access a gated repo|Environment variable HF_TOKEN must be set"
        r"|Can't load tokenizer for|couldn't connect to 'https://huggingface\.co'|LocalEntryNotFoundError|RepositoryNotFoundError",
        "The tokenizer cannot be fetched: its repository is gated, or cannot be reached.",
        "accept the model's licence on huggingface.co and export HF_TOKEN, or name a local tokenizer",
    ),
    _signature(
        "missing_module",
        "failed",
        r"(?:ModuleNotFoundError: )?No module named '?(?P<module>[\w.]+)'?",
        "The Python module {module} is missing where the engine runs.",
        "install {module} into the environment of the engine",
    ),
    _signature(
        "no_gpu",
        "failed",
        r"No (?:HIP|CUDA) GPUs are available|hipErrorNoDevice|no CUDA-capable device|Found no NVIDIA driver|no GPUs found!"
        r"|Torch not compiled with CUDA enabled|Device does not exist on host: /dev/kfd|CUDA driver version is insufficient",
        "The framework finds no GPU.",
        "check nvidia-smi or rocm-smi in the same shell or container, and CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES",
    ),
    _signature(
        "port_in_use",
        "failed",
        r"EADDRINUSE|[Aa]ddress already in use",
        "The port for the ranks to meet on is in use.",
        "end the run that holds it, or set MASTER_PORT to another port",
    ),
    _signature(
        "disk_full",
        "failed",
        r"No space left on device|\[Errno 28\]|Disk quota exceeded",
        "The disk is full.",
        "free space, or choose another folder with --output-dir",
    ),
    _signature(
        "wrong_build",
        "failed",
        r"no kernel image is available for execution|is not compatible with the current PyTorch installation"
        r"|hipErrorNoBinaryForGpu",
        "torch, or one of its extensions, was not built for this GPU.",
        "install the build of torch for this GPU and its driver",
    ),
    _signature(
        "gpu_fault",
        "failed",
        r"Memory access fault by GPU|HSA_STATUS_ERROR\w*|(?:HIP|CUDA) error: (?!out of memory)"
        r"|uncorrectable ECC|\bXid\b",
        "A GPU failed or was used wrongly: {line}",
        "run once more; if it fails again on the same GPU, take that GPU out and look into dmesg",
    ),
    _signature(
        "scheduler_limit",
        "timed_out",
        r"CANCELLED AT \S+ DUE TO TIME LIMIT",
        "The scheduler ended the job at its time limit.",
        "ask for more time, or fewer steps",
    ),
    _signature("scheduler", "interrupted", r"CANCELLED AT \S+", "The scheduler cancelled the job.", None),
)
"""In the order of their priority: a full memory makes other ranks time out, never the other way round."""

STOPPED = "stopped_by_signal"
SECONDARY = (
    _signature(
        STOPPED,
        "interrupted",
        r"SignalException: Process \d+ got signal: (?P<number>\d+)",
        "Somebody else than this launcher stopped it with signal {number}.",
    ),
    _signature(
        "rendezvous_timeout",
        "timed_out",
        r"client socket has timed out after|RendezvousTimeoutError|RendezvousConnectionError",
        "The ranks did not find each other.",
        "start the same command on every node; MASTER_ADDR must be the first one, and its port reachable",
    ),
    _signature(
        "collective_timeout",
        "timed_out",
        r"caught collective operation timeout: (?:.*OpType=(?P<operation>\w+))?|Heartbeat monitor timed out|watchdog got stuck"
        r"|collective operations have failed or timed out|Timed out waiting \d+ms for (?:recv|send) operation",
        "A collective operation timed out: one rank did not come to it.",
        "look for the rank that stopped first; NCCL_DEBUG=INFO shows the connections",
    ),
    _signature(
        "collective_error",
        "failed",
        r"NCCL error in|ncclUnhandledCudaError|ncclSystemError|ncclRemoteError|ncclInternalError|DistBackendError",
        "NCCL (RCCL) failed: {line}",
        "NCCL_DEBUG=WARN in platform_optimizations.*.environment names the reason",
    ),
)
"""What the other ranks say when one of them has died."""

ECHOES = (
    _signature(
        "lost_peer",
        "failed",
        r"Connection closed by peer|Connection reset by peer|Broken pipe",
        "A rank lost its connection to another one, which ended first.",
        None,
    ),
)
"""What is said only because somebody else has died: any other word is a better cause."""
