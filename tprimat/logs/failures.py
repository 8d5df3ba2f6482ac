"""Why a run failed, in one line for people: from its exit code, its log, its steps and the kernel's counters.

Sources of the signatures: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and c10/cuda/CUDACachingAllocator.cpp (whose CUDA
becomes HIP on ROCm), torch/distributed/elastic, Megatron-LM's megatron/training/arguments.py and rerun_state_machine.py,
huggingface_hub/errors.py, Primus's launcher, the Linux kernel's mm/oom_kill.c, slurmstepd.
"""

import dataclasses
import re
import signal
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

from tprimat.records.schema import Outcome, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run did not complete."""

    outcome: Outcome
    cause: str
    """One line, never empty."""
    hint: str | None = None
    """One line: what to try."""
    evidence: str | None = None
    """The line of the log that shows it."""
    kind: str | None = None
    """Name of the signature that matched."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One class of failures. The cause may use the named groups of the pattern."""

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
"""Harmless lines that look like failures."""

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
        "The loss or a gradient is not a finite number.",
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
        "The rendezvous port is in use.",
        "stop the run that holds the port, or set MASTER_PORT to another one",
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
"""By priority: a rank out of memory makes other ranks time out, never the other way round."""

STOPPED = "stopped_by_signal"
SECONDARY = (
    _signature(
        STOPPED,
        "interrupted",
        r"SignalException: Process \d+ got signal: (?P<number>\d+)",
        "Something other than this launcher stopped it with signal {number}.",
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
        "A collective operation timed out: one rank did not reach it.",
        "find the rank that stopped first; NCCL_DEBUG=INFO shows the connections",
    ),
    _signature(
        "collective_error",
        "failed",
        r"NCCL error in|ncclUnhandledCudaError|ncclSystemError|ncclRemoteError|ncclInternalError|DistBackendError",
        "NCCL (RCCL) failed: {line}",
        "set NCCL_DEBUG=WARN in platform_optimizations.*.environment to see the reason",
    ),
)
"""What the other ranks print after one of them has died."""

ECHOES = (
    _signature(
        "lost_peer",
        "failed",
        r"Connection closed by peer|Connection reset by peer|Broken pipe",
        "A rank lost its connection to another one, which ended first.",
        None,
    ),
)
"""Consequences of another rank's death: any other message is a better cause."""


CGROUPS = Path("/sys/fs/cgroup")


def out_of_memory_kills() -> int | None:
    """Return the kernel's out-of-memory kills so far: SIGKILL leaves no message in the log.

    Counted in our cgroup (memory.events of cgroups v2) and on the machine (/proc/vmstat); None where neither can be read.
    """
    counts = [count for path in oom_kill_files() if (count := read_count(path)) is not None]
    return sum(counts) if counts else None


def oom_kill_files() -> list[Path]:
    """Return the files that may hold a count."""
    files = [Path("/proc/vmstat"), CGROUPS / "memory.events"]
    try:
        group = Path("/proc/self/cgroup").read_text(encoding="utf8")
    except OSError:
        return files
    own = re.search(r"^0::/(.+)$", group, re.MULTILINE)
    return [*files, CGROUPS / own[1] / "memory.events"] if own else files


def read_count(path: Path) -> int | None:
    """Read the count in one file."""
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(encoding="utf8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return int(found[1]) if found else None


ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
ROOT_CAUSE = "Root Cause (first observed failure)"
EXCEPTION = re.compile(r"(?:^|\] *:? *|\s)(?P<text>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Failure)(?:: .*)?)$")
WRAPPERS = re.compile(r"ChildFailedError|Training execution failed: |^\[Primus\] Error: ")
UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
LONGEST_CAUSE = 300
LOSS_GROWTH = 1.5
"""An untrained model's loss is about the logarithm of the vocabulary; only a diverging run climbs this far above that."""


def classify(
    exit_code: int | None,
    lines: Iterable[str],
    steps: Sequence[StepRecord],
    *,
    alternatives: Sequence[str] = (),
    killed_for_memory: bool = False,
) -> Failure | None:
    """Return why a run failed that this launcher did not stop.

    torchrun's block on the root cause comes first, then the log of the rank it names, then the whole log. Within each, signatures
    are searched in the order of PRIMARY, and the earliest matching line counts.

    Args:
        exit_code: of the process; minus the number of a signal, or 128 plus it from a shell.
        lines: of the log, and of the logs of the ranks.
        steps: the measured steps.
        alternatives: strategies that need less memory, the closest first.
        killed_for_memory: whether the kernel counted an out-of-memory kill during the run.

    Returns:
        None where the run completed.
    """
    if exit_code == 0:
        return unfinished(steps) or diverging(steps)
    texts = meaningful(lines)
    block = root_cause_block(texts)
    first_rank = lines_of_rank(texts, block)
    number = signal_of(exit_code, block)
    found = (
        search(PRIMARY, block)
        or search(PRIMARY, first_rank)
        or search(PRIMARY, texts)
        or killed(number, killed_for_memory, f"exit code {exit_code}")
        or crashed(number)
        or search(SECONDARY, first_rank)
        or last_exception(first_rank)
        or search(SECONDARY, texts)
        or diverging(steps)
        or last_exception(texts)
        or search(ECHOES, texts)
        or signalled(number)
        or last_line(exit_code, texts)
    )
    if found.outcome != "out_of_memory":
        return found
    return dataclasses.replace(found, hint=memory_hint(found, alternatives))


def add_log_hint(stopped: Failure, lines: Iterable[str]) -> Failure:
    """Add to the failure of a hung or late run what its log shows; the signal that stopped it explains nothing."""
    texts = meaningful(lines)
    logged = search(PRIMARY, texts) or search([signature for signature in SECONDARY if signature.kind != STOPPED], texts)
    if logged is None or logged.evidence is None:
        return stopped
    cause = shortened(f"{stopped.cause} The log says: {logged.evidence}")
    return dataclasses.replace(stopped, cause=cause, evidence=logged.evidence, hint=logged.hint or stopped.hint)


def meaningful(lines: Iterable[str]) -> list[str]:
    """Return the lines without colours, empty lines and harmless lines."""
    return [text for line in lines if not BENIGN.search(text := ANSI.sub("", line).strip()) and text]


def unfinished(steps: Sequence[StepRecord]) -> Failure | None:
    """Return the failure of a run that ended without an error and without a step."""
    if steps:
        return None
    return Failure(
        outcome="failed", cause="The process ended without an error and without a single step.", hint="the log may say why"
    )


def diverging(steps: Sequence[StepRecord]) -> Failure | None:
    """Return the failure of a run whose loss is not finite at the end, or far above its first value."""
    hint = "lower the learning rate, lengthen the warm-up, or use bf16 instead of fp8"
    if steps and not steps[-1].finite:
        first = next(step.step for step in steps if not step.finite)
        return Failure(
            outcome="diverged", cause=f"The loss or the gradient norm is not finite, first in step {first}.", hint=hint
        )
    first_losses = list(islice((step.loss for step in steps if step.loss is not None), 10))
    last_losses = list(islice((step.loss for step in reversed(steps) if step.loss is not None), 3))
    if len(first_losses) < 10 or (last := statistics.median(last_losses)) <= LOSS_GROWTH * first_losses[0]:
        return None
    return Failure(outcome="diverged", cause=f"The loss grew from {first_losses[0]:.4g} to {last:.4g}.", hint=hint)


def root_cause_block(lines: Sequence[str]) -> list[str]:
    """Return what torchrun prints about the rank that failed first."""
    starts = [index for index, line in enumerate(lines) if ROOT_CAUSE in line]
    if not starts:
        return []
    rest = lines[starts[-1] + 1 :]
    ends = (index for index, line in enumerate(rest) if "=====" in line)
    return list(rest[: next(ends, 40)])


def lines_of_rank(lines: Sequence[str], block: Sequence[str]) -> list[str]:
    """Return the lines of the rank that the block names, marked [rank3] by torch or rank-3/8 by Primus."""
    ranks = [match[1] for line in block if (match := re.match(r"rank\s*: (\d+)", line))]
    if not ranks:
        return []
    marks = (f"[rank{ranks[0]}]", f"rank-{ranks[0]}/")
    return [line for line in lines if any(mark in line for mark in marks)]


def search(signatures: Sequence[Signature], lines: Sequence[str]) -> Failure | None:
    """Return the failure of the first signature that matches, from its earliest line."""
    for signature in signatures:
        for line in lines:
            if match := signature.pattern.search(line):
                return explain(signature, match, line, lines)
    return None


def explain(signature: Signature, match: re.Match[str], line: str, lines: Sequence[str]) -> Failure:
    """Return the failure in words, with what the line states."""
    words = {name: value or "" for name, value in match.groupdict().items()} | {"line": line}
    cause = gpu_memory_cause(lines) or signature.cause if signature.kind == "out_of_memory" else signature.cause
    hint = signature.hint.format_map(words) if signature.hint else None
    if signature.kind == "worker_refused":
        hint = worker_hint(line, lines)
    return Failure(
        outcome=signature.outcome,
        cause=shortened(cause.format_map(words)),
        hint=hint,
        evidence=shortened(line),
        kind=signature.kind,
    )


def worker_hint(line: str, lines: Sequence[str]) -> str | None:
    """Return the fix that a worker's own error names in the rows after its first: at, why, try (errors.UserError)."""
    rows = takewhile(re.compile("(?:at|why|try) +").match, lines[lines.index(line) + 1 :])
    return next((row.removeprefix("try").strip() for row in rows if row.startswith("try")), None)


def gpu_memory_cause(lines: Sequence[str]) -> str | None:
    """Describe the largest failed allocation and the free memory; None where no line has one."""
    matches = [match for line in lines if (match := GPU_MEMORY.search(line))]
    if not matches:
        return None
    largest = max(matches, key=lambda match: as_bytes(match["size"]))
    text = f"The GPU ran out of memory: it tried to allocate {largest['size']}"
    if largest["gpu"] is not None:
        text += f" on GPU {largest['gpu']}, where {largest['free']} of {largest['capacity']} were free"
    return text + "."


def as_bytes(text: str) -> float:
    """Return '3.31 GiB' in bytes."""
    number, unit = text.split()
    return float(number) * UNITS.get(unit, 1)


def memory_hint(found: Failure, alternatives: Sequence[str]) -> str | None:
    """Return what to try with less memory."""
    if not alternatives or not (found.hint or "").startswith(LESS_MEMORY):
        return found.hint
    return f"try --parallel {alternatives[0]}, which needs less memory; or {LESS_MEMORY}"


def signal_of(exit_code: int | None, block: Sequence[str]) -> int | None:
    """Return the signal that ended the first rank, or the process itself."""
    for line in block:
        if match := re.search(r"exitcode\s*: -(\d+)", line):
            return int(match[1])
    if exit_code is None:
        return None
    if exit_code < 0:
        return -exit_code
    return exit_code - 128 if 128 < exit_code <= 128 + 64 else None


def killed(number: int | None, for_memory: bool, evidence: str) -> Failure | None:
    """Return the failure after SIGKILL, whose reason only the kernel's counters show."""
    if number != signal.SIGKILL:
        return None
    if for_memory:
        return Failure(
            outcome="out_of_memory",
            cause="The kernel killed a process because the machine ran out of main memory.",
            hint="use fewer processes, a smaller model size or batch, or a machine (or job) with more main memory",
            evidence=evidence,
        )
    return Failure(
        outcome="failed",
        cause="A process was killed with SIGKILL, by the kernel for memory or by the scheduler.",
        hint="dmesg (Out of memory: Killed process) or the scheduler's log shows which; watch the main memory",
        evidence=evidence,
    )


def crashed(number: int | None) -> Failure | None:
    """Return the failure after a signal of a process's own fault. Not SIGABRT: NCCL's watchdog raises it, and prints why."""
    return signalled(number) if number in {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE} else None


def signalled(number: int | None) -> Failure | None:
    """Return the failure after any other signal."""
    if number is None or number not in set(signal.Signals):
        return None
    name = signal.Signals(number).name
    if number in {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
        return Failure(outcome="interrupted", cause=f"Something other than this launcher stopped it with {name}.")
    return Failure(
        outcome="failed", cause=f"A process crashed with {name}.", hint="the log around the crash may name the library"
    )


def last_exception(lines: Sequence[str]) -> Failure | None:
    """Return the failure by the last exception, except those that wrap another one or follow from it."""
    own = (
        line for line in reversed(lines) if not WRAPPERS.search(line) and not any(echo.pattern.search(line) for echo in ECHOES)
    )
    for line in own:
        if match := EXCEPTION.search(line):
            text = shortened(match["text"])
            return Failure(outcome="failed", cause=text, hint="the log has the whole traceback", evidence=shortened(line))
    return None


def last_line(exit_code: int | None, lines: Sequence[str]) -> Failure:
    """Return the failure of a run without any known cause."""
    cause = f"The process ended with exit code {exit_code}"
    if not lines:
        return Failure(outcome="failed", cause=f"{cause} and printed nothing.")
    last = shortened(lines[-1])
    return Failure(outcome="failed", cause=f"{cause}; its last line: {last}", hint="the log may say more", evidence=last)


def shortened(text: str) -> str:
    """Return the text as one line of at most LONGEST_CAUSE characters."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_CAUSE else line[: LONGEST_CAUSE - 1] + "…"
