"""Name the cause of a failed run in one line, from its exit code, its log and its steps.

Sources of the patterns: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, c10/cuda/CUDACachingAllocator.cpp (whose CUDA becomes
HIP on ROCm), torch/distributed/elastic, Megatron-LM's megatron/training/arguments.py and rerun_state_machine.py,
huggingface_hub/errors.py, Primus's launcher, the Linux kernel's mm/oom_kill.c, slurmstepd.
"""

import dataclasses
import re
import signal
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from tprimat.core.errors import WORKER_ERROR
from tprimat.logs.fields import ESCAPES
from tprimat.records.schema import Outcome, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run did not complete."""

    outcome: Outcome
    cause: str
    """One line, never empty."""
    hint: str | None = None
    """What to try, in one line."""
    evidence: str | None = None
    """The line of the log that shows it."""
    kind: str | None = None
    """`kind` of the matching signature."""
    cut_off: bool = False
    """The scheduler's time limit or a lost node ended the run, which might have completed."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One class of failures. `cause` and `hint` may contain {groups} of the pattern and {line}."""

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
    r"|exitcode\s*: -15|nan iterations:\s*0\b|^tprimat run: |after training is done"
    r"|^Cannot import zarr, support for zarr-based checkpoints"
)
"""Harmless lines that look like errors."""

GPU_MEMORY = re.compile(
    r"(?:HIP|CUDA) out of memory\. Tried to allocate (?P<size>[\d.]+ [KMGT]?i?B)"
    r"(?:.*?GPU (?P<gpu>\d+) has a total capac?i?ty of (?P<capacity>[\d.]+ [KMGT]?i?B)"
    r" of which (?P<free>[\d.]+ [KMGT]?i?B|\d+ bytes) is free)?"
)

LESS_MEMORY = "lower --micro-batch-size, or set recompute to full"

PRIMARY = (
    _signature("worker_refused", "failed", rf"^{WORKER_ERROR}(?P<what>.+)$", "{what}"),
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
        "The loss or a gradient is no longer finite.",
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
        "The framework rejects the configuration: {text}",
        "./validate_config.py lists what is valid",
    ),
    _signature(
        "tokenizer",
        "failed",
        r"GatedRepoError|[Cc]annot access gated repo|access a gated repo|Environment variable HF_TOKEN must be set"
        r"|Can't load tokenizer for|couldn't connect to 'https://huggingface\.co'|LocalEntryNotFoundError|RepositoryNotFoundError",
        "The tokenizer cannot be downloaded: its repository is gated or unreachable.",
        "accept the model's licence on huggingface.co and export HF_TOKEN, or name a local tokenizer",
    ),
    _signature(
        "missing_module",
        "failed",
        r"(?:(?:ModuleNotFound|Import)Error: |\bpython[\d.]*: )No module named '?(?P<module>[\w.]+)'?",
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
        "The rendezvous port of the ranks is in use.",
        "end the run that uses it, or set MASTER_PORT to another port",
    ),
    _signature(
        "disk_full",
        "failed",
        r"No space left on device|\[Errno 28\]|Disk quota exceeded",
        "The disk is full.",
        "free space, or choose another folder with --output-dir",
    ),
    _signature(
        "open_files",
        "failed",
        r"Too many open files|\[Errno 24\]|received 0 items of ancdata",
        "A process may open no more files.",
        "ulimit -n 65536 before the command; docker run --ulimit nofile=65536",
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
        "device_assert",
        "failed",
        r"device-side assert triggered",
        "A kernel found an impossible value, such as an index beyond the end of a table (device-side assert).",
        "the line with 'Assertion' in the log names it; a token of the data may lie beyond the vocabulary",
    ),
    _signature(
        "gpu_fault",
        "failed",
        r"Memory access fault by GPU|HSA_STATUS_ERROR\w*|(?:HIP|CUDA) error: (?!out of memory)"
        r"|uncorrectable ECC|\bXid\b",
        "A GPU failed or was used wrongly: {line}",
        "run it again; if the same GPU fails again, exclude that GPU and check dmesg",
    ),
    _signature(
        "scheduler_limit",
        "timed_out",
        r"CANCELLED AT \S+ DUE TO TIME LIMIT",
        "The scheduler ended the job at its time limit.",
        "ask for more time, or fewer steps",
    ),
    _signature(
        "node_failure",
        "failed",
        r"CANCELLED AT \S+ DUE TO NODE FAILURE",
        "The scheduler lost a node of the job.",
        "the scheduler's log names it; --resume repeats the run",
    ),
    _signature("scheduler", "interrupted", r"CANCELLED AT \S+", "The scheduler cancelled the job.", None),
)
"""By priority: out of memory on one rank makes the others time out, never the other way round."""

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
        r"client socket has timed out after|waiting for clients\. \d+/\d+ clients joined"
        r"|RendezvousTimeoutError|RendezvousConnectionError",
        "The ranks did not find each other.",
        "start the same command on every node; MASTER_ADDR must be the first node, and its port reachable",
    ),
    _signature(
        "collective_timeout",
        "timed_out",
        r"caught collective operation timeout: (?:.*OpType=(?P<operation>\w+))?|Heartbeat monitor timed out|watchdog got stuck"
        r"|collective operations have failed or timed out|Timed out waiting \d+ms for (?:recv|send) operation",
        "A collective operation timed out: one rank never reached it.",
        "find the rank that stopped first; NCCL_DEBUG=INFO shows the connections",
    ),
    _signature(
        "collective_error",
        "failed",
        r"NCCL error in|ncclUnhandledCudaError|ncclSystemError|ncclRemoteError|ncclInternalError|DistBackendError",
        "NCCL (RCCL) failed: {line}",
        "set NCCL_DEBUG=WARN in platform_optimizations.*.environment to log the reason",
    ),
)
"""Errors of the remaining ranks after one of them has died."""

ECHOES = (
    _signature(
        "lost_peer",
        "failed",
        r"Connection closed by peer|Connection reset by peer|Broken pipe",
        "A rank lost its connection to another rank, which ended first.",
        None,
    ),
)
"""Pure consequences of another rank's death: any other error is a better cause."""

TRANSIENT = {"port_in_use", "rendezvous_timeout", "collective_error", "lost_peer"}
"""Kinds of failures that a second start may not have: they come from the network between the ranks, not from the plan."""

ROOT_CAUSE = "Root Cause (first observed failure)"
EXCEPTION = re.compile(
    r"(?:^|\] *(?:: *)?|\s)(?P<text>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Failure)(?:: .*)?)$"
)
RAISED_WARNING = re.compile(r"(?:\[rank\d+\]:\s*)?(?P<text>(?:[A-Za-z_]\w*\.)*[A-Z]\w*Warning: .*)$")
"""Under PYTHONWARNINGS=error, at the start of the line below a frame; those that are printed have their file before them."""
FRAME = re.compile(r"(?:\[rank\d+\]:\s*)?File \".*\", line \d+")
RANK_MARK = re.compile(r"^\[rank\d+\]:\s*")
ASSERT = re.compile(r"assert .+")
LINES_OF_A_FRAME = 3
"""The file, its source, and marks below it."""
WRAPPERS = re.compile(r"ChildFailedError|Training execution failed: |^\[Primus\] Error: ")
UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
MAX_CAUSE_CHARACTERS = 300
LIMIT_SECONDS, WARNING_SECONDS = 10.0, 900.0
"""How long before its time limit a scheduler's SIGTERM, or the warning that a user asked for, is about that limit."""
LOSS_GROWTH = 1.5
"""An untrained model starts with a loss of about log(vocabulary); only a diverging run climbs this far above it."""


def classify(
    exit_code: int | None,
    lines: Iterable[str],
    steps: Sequence[StepRecord],
    *,
    alternatives: Sequence[str] = (),
    oom_killed: bool = False,
) -> Failure | None:
    """Find the cause of death of a run that the launcher did not stop.

    Searches torchrun's root-cause block first, then the log of the rank that it names, then the whole log. Within each, classes
    are tried in the order of PRIMARY, and the earliest line of a class is taken. An exception of the rank that failed first comes
    before what any other process says.

    Args:
        exit_code: of the process; a negative number is a signal. Shells report 128 plus the signal number.
        lines: of the log and of the ranks' own logs.
        steps: the steps that were measured.
        alternatives: strategies that need less memory, the nearest first.
        oom_killed: whether the kernel counted an out-of-memory kill during the run.

    Returns:
        None if the run completed.
    """
    if exit_code == 0:
        return unfinished(steps) or diverging(steps)
    texts = meaningful(lines)
    block = root_cause_block(texts)
    first_rank = of_rank(texts, block)
    number = signal_of(exit_code, block)
    found = (
        search(PRIMARY, block)
        or search(PRIMARY, first_rank)
        or own_exception(first_rank)
        or search(PRIMARY, texts)
        or killed(number, oom_killed, f"exit code {exit_code}")
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


AGAIN = "the same command with --resume makes this run again, and skips those that have ended"


def stopped_by(name: str, seconds_left: float | None) -> Failure:
    """Return why a run ended that its launcher stopped because of a signal.

    Args:
        name: of the signal, such as SIGTERM.
        seconds_left: until the scheduler's time limit; None if there is none or it is unknown.
    """
    margin = WARNING_SECONDS if name in {"SIGUSR1", "SIGUSR2"} else LIMIT_SECONDS
    if seconds_left is None or seconds_left > margin or name in {"SIGINT", "SIGHUP"}:
        return Failure(outcome="interrupted", cause=f"Stopped by {name}.", hint=AGAIN)
    when = f"{seconds_left:.0f} s before" if seconds_left > 0 else "at"
    cause = f"The scheduler's time limit: {name} came {when} the end of the job."
    return Failure(outcome="timed_out", cause=cause, hint=f"ask for more time, or fewer steps; {AGAIN}", cut_off=True)


def earliest(found: Sequence[tuple[Failure, Sequence[str]]]) -> Failure:
    """Return which of the failures of several nodes came first: causes before consequences, then by torchrun's own times.

    Each is what a node's log says, with its lines; at least one, the most likely first.
    """
    return min(found, key=lambda pair: (is_consequence(pair[0]), failed_at(pair[1])))[0]


def is_consequence(failure: Failure) -> bool:
    """Return whether a failure is how ranks end after one of them, perhaps on another node, has ended."""
    kinds = {signature.kind for signature in (*SECONDARY, *ECHOES)}
    text = f"{failure.cause} {failure.evidence or ''}"
    return (
        failure.kind in kinds or failure.outcome == "interrupted" or any(echo.pattern.search(text) is not None for echo in ECHOES)
    )


def failed_at(lines: Iterable[str]) -> str:
    """Return when the first rank of a node failed, as torchrun writes it (2026-01-01_00:00:00); lines without it sort last."""
    times = (re.match(r"time\s*: ([\d_:-]+)", line) for line in root_cause_block(meaningful(lines)))
    return next((match[1] for match in times if match), "~")


def add_log_hint(stopped: Failure, lines: Iterable[str]) -> Failure:
    """Add an error found in the log to the failure of a run that we stopped; our own signal does not count as one."""
    texts = meaningful(lines)
    found = search(PRIMARY, texts) or search([signature for signature in SECONDARY if signature.kind != STOPPED], texts)
    if found is None or found.evidence is None:
        return stopped
    cause = shortened(f"{stopped.cause} The log says: {found.evidence}")
    return dataclasses.replace(stopped, cause=cause, evidence=found.evidence, hint=found.hint or stopped.hint)


def meaningful(lines: Iterable[str]) -> list[str]:
    """Remove control sequences, empty lines and harmless lines that look like errors."""
    return [text for line in lines if not BENIGN.search(text := ESCAPES.sub("", line).strip()) and text]


def unfinished(steps: Sequence[StepRecord]) -> Failure | None:
    """Return a failure if the run ended without a single step."""
    if steps:
        return None
    return Failure(
        outcome="failed", cause="The process ended without an error and without a single step.", hint="the log may show why"
    )


def ended_early(steps: Sequence[StepRecord], planned: int) -> Failure | None:
    """Return a failure if a process that reports success has not reached its last planned step. There is at least one step.

    A framework that logs every tenth step may end up to nine steps after its last line.
    """
    last = steps[-1].step
    interval = (last - steps[-2].step) // steps[-1].merged if len(steps) > 1 else last
    if last + interval > planned:
        return None
    cause = f"The process ended with exit status 0 after step {last} of {planned}."
    return Failure(outcome="failed", cause=cause, hint="the log may show why; what was measured is kept")


def diverging(steps: Sequence[StepRecord]) -> Failure | None:
    """Return a failure if the loss is not finite at the end, or ended far above its start."""
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
    """Return torchrun's lines about the rank that failed first."""
    starts = [index for index, line in enumerate(lines) if ROOT_CAUSE in line]
    if not starts:
        return []
    rest = lines[starts[-1] + 1 :]
    ends = (index for index, line in enumerate(rest) if "=====" in line)
    return list(rest[: next(ends, 40)])


def of_rank(lines: Sequence[str], block: Sequence[str]) -> list[str]:
    """Return the lines of the rank that the block names, marked [rank3]: by torch or rank-3/8 by Primus."""
    ranks = [match[1] for line in block if (match := re.match(r"rank\s*: (\d+)", line))]
    if not ranks:
        return []
    marks = (f"[rank{ranks[0]}]", f"rank-{ranks[0]}/")
    return [line for line in lines if any(mark in line for mark in marks)]


def search(signatures: Sequence[Signature], lines: Sequence[str]) -> Failure | None:
    """Return the failure of the first matching signature, at its earliest line."""
    for signature in signatures:
        for line in lines:
            if match := signature.pattern.search(line):
                return failure_of(signature, match, line, lines)
    return None


def failure_of(signature: Signature, match: re.Match[str], line: str, lines: Sequence[str]) -> Failure:
    """Fill the signature's texts with the details of the line."""
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
    """Return the `try` row of a worker's own error, whose first line is followed by rows at, why, try (errors.UserError)."""
    rows = takewhile(re.compile("(?:at|why|try) +").match, lines[lines.index(line) + 1 :])
    return next((row.removeprefix("try").strip() for row in rows if row.startswith("try")), None)


def gpu_memory_cause(lines: Sequence[str]) -> str | None:
    """Describe the largest failed allocation and the memory that was free."""
    matches = [match for line in lines if (match := GPU_MEMORY.search(line))]
    if not matches:
        return None
    largest = max(matches, key=lambda match: as_bytes(match["size"]))
    text = f"The GPU ran out of memory: it tried to allocate {largest['size']}"
    if largest["gpu"] is not None:
        text += f" on GPU {largest['gpu']}, where {largest['free']} of {largest['capacity']} were free"
    return text + "."


def as_bytes(text: str) -> float:
    """Convert '3.31 GiB' to bytes."""
    number, unit = text.split()
    return float(number) * UNITS.get(unit, 1)


def memory_hint(found: Failure, alternatives: Sequence[str]) -> str | None:
    """Suggest the nearest strategy that needs less memory."""
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


def killed(number: int | None, oom_killed: bool, evidence: str) -> Failure | None:
    """Explain a SIGKILL from outside, which leaves no message; the kernel counts those for memory."""
    if number != signal.SIGKILL:
        return None
    if oom_killed:
        return Failure(
            outcome="out_of_memory",
            cause="The kernel killed a process because the machine ran out of main memory.",
            hint="use fewer processes, a smaller model size or batch, or a machine (or job) with more main memory",
            evidence=evidence,
        )
    return Failure(
        outcome="failed",
        cause="A process was killed with SIGKILL, by the kernel for memory or by the scheduler.",
        hint="check dmesg (Out of memory: Killed process) or the scheduler's log; watch the main memory",
        evidence=evidence,
    )


def crashed(number: int | None) -> Failure | None:
    """Explain a signal caused by the process itself. Not SIGABRT: NCCL's watchdog aborts a process and logs why."""
    return signalled(number) if number in {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE} else None


def signalled(number: int | None) -> Failure | None:
    """Explain any other signal."""
    if number is None or number not in set(signal.Signals):
        return None
    name = signal.Signals(number).name
    if number in {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
        return Failure(outcome="interrupted", cause=f"Something other than this launcher stopped it with {name}.")
    return Failure(
        outcome="failed", cause=f"A process crashed with {name}.", hint="the log around the crash may name the library"
    )


def last_exception(lines: Sequence[str]) -> Failure | None:
    """Return the last exception that matches no signature, ignoring wrappers and echoes of another rank's death."""
    for index in reversed(range(len(lines))):
        line = lines[index]
        if WRAPPERS.search(line) or any(echo.pattern.search(line) for echo in ECHOES):
            continue
        below_frame = any(map(FRAME.match, lines[max(0, index - LINES_OF_A_FRAME) : index]))
        if match := EXCEPTION.search(line) or (RAISED_WARNING.match(line) if below_frame else None):
            text = shortened(match["text"] + more_of_exception(match["text"], lines, index))
            return Failure(outcome="failed", cause=text, hint="the log has the whole traceback", evidence=shortened(line))
    return None


def more_of_exception(text: str, lines: Sequence[str], index: int) -> str:
    """Return what the line of an exception leaves out: the next line after a colon, the condition of an assert without a text."""
    if text.endswith(":"):
        following = lines[index + 1] if index + 1 < len(lines) else ""
        return f" {RANK_MARK.sub('', following).strip()}"
    if ":" not in text:
        for line in reversed(lines[max(0, index - LINES_OF_A_FRAME) : index]):
            if match := ASSERT.match(RANK_MARK.sub("", line)):
                return f": {match[0]}"
    return ""


def own_exception(lines: Sequence[str]) -> Failure | None:
    """Return the exception of the rank that failed first, unless it only shows that another rank had trouble before."""
    found = last_exception(lines)
    return None if found is None or is_consequence(found) or search(SECONDARY, lines) else found


def last_line(exit_code: int | None, lines: Sequence[str]) -> Failure:
    """Fall back to the exit code and the last line."""
    cause = f"The process ended with exit code {exit_code}"
    if not lines:
        return Failure(outcome="failed", cause=f"{cause} and printed nothing.")
    last = shortened(lines[-1])
    return Failure(outcome="failed", cause=f"{cause}; its last line: {last}", hint="the log may show more", evidence=last)


def shortened(text: str) -> str:
    """Join the text to one line of at most MAX_CAUSE_CHARACTERS."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_CAUSE_CHARACTERS else line[: MAX_CAUSE_CHARACTERS - 1] + "…"
