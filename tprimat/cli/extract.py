"""A training log of Primus, Megatron-LM or any other framework that is known here becomes a benchmark file."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.console import outlasting
from tprimat.errors import MetricError, UserError

if TYPE_CHECKING:
    from tprimat.logs.extract import Extracted
    from tprimat.logs.lines import LogLines
    from tprimat.logs.parse import LogReading
    from tprimat.records.metrics import RunMetrics

REWRITE_SECONDS = 1.0
"""A followed log is written out at most so often."""
REWRITE_SHARE = 3
"""And writing takes at most a quarter of the time, however many steps there are."""
DIALECTS = (
    "auto",
    "primus",
    "megatron-bridge",
    "megatron-lm",
    "nemo",
    "torchtitan",
    "torchtune",
    "nanotron",
    "maxtext",
    "deepspeed",
    "composer",
)


def positive(text: str) -> int:
    """A count."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="extract_primus_metrics.py", description=__doc__)
    made.add_argument("--log-file", required=True, metavar="PATH", help="the log, plain or gzipped; - for standard input")
    made.add_argument("--model-name", required=True, metavar="NAME", help="llama, qwen, or another model of config.yaml")
    made.add_argument("--num-gpus", type=positive, metavar="N", help="GPUs in all (what the log says)")
    made.add_argument("--num-nodes", type=positive, metavar="N", help="nodes that they stand in (1 for up to 8 GPUs)")
    made.add_argument("--global-batch-size", type=positive, metavar="N", help="sequences a step (what the log says)")
    made.add_argument("--sequence-length", type=positive, metavar="N", help="tokens a sequence (what the log says)")
    made.add_argument("--gpu", metavar="NAME", help="the accelerator that ran (what the log says; never this machine's)")
    made.add_argument("--parallel", metavar="STRATEGY", help="the strategy of config.yaml that ran; checked against the log")
    made.add_argument("--dialect", choices=DIALECTS, default="auto", metavar="NAME", help=f"one of {', '.join(DIALECTS)} (auto)")
    made.add_argument("--output", type=Path, metavar="PATH", help="file to write (benchmark_PLATFORM_MODEL.json beside the log)")
    made.add_argument("--follow", action="store_true", help="go on while the log grows, until it says that training is done")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 where the log tells of a failed run, 2 for a mistake of the command line or an unreadable log."""
    options = parser().parse_args(argv)
    try:
        return run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """Read, write, tell."""
    from tprimat.logs.lines import LogLines
    from tprimat.logs.parse import LogReading

    log = LogLines(path=options.log_file, follow=options.follow)
    reading = LogReading(name=log.name, asked=options.dialect)
    due, steps = time.monotonic() + REWRITE_SECONDS, 0
    try:
        for batch in log.batches():
            reading.add(batch)
            log.stop = reading.said.finished
            if options.follow and len(reading.said) > steps and time.monotonic() >= due:
                started, steps = time.monotonic(), len(reading.said)
                save(options, made(options, log, reading, growing=True))
                due = time.monotonic() + max(REWRITE_SECONDS, REWRITE_SHARE * (time.monotonic() - started))
    except KeyboardInterrupt:
        print("stopped; what was read so far is kept", file=sys.stderr)
    if log.why_truncated:
        print(f"note: {log.name} is damaged: {log.why_truncated}", file=sys.stderr)
    result = made(options, log, reading, growing=False)
    path, metrics = save(options, result)
    tell(result, metrics, path)
    return 0 if result.run.outcome in {"completed", "interrupted"} else 1


def made(options: argparse.Namespace, log: "LogLines", reading: "LogReading", *, growing: bool) -> "Extracted":
    """The record of what was read so far."""
    from tprimat.config.load import load_config
    from tprimat.logs.extract import Flags, extract
    from tprimat.records.schema import LogSource

    flags = Flags(
        model=options.model_name,
        gpus=options.num_gpus,
        nodes=options.num_nodes,
        global_batch_sequences=options.global_batch_size,
        sequence_tokens=options.sequence_length,
        accelerator=options.gpu,
        strategy=options.parallel,
    )
    source = LogSource(path=log.name, sha256=log.sha256, truncated=log.truncated)
    return extract(reading, flags, source, load_config(), growing=growing)


def save(options: argparse.Namespace, result: "Extracted") -> tuple[Path, "RunMetrics | None"]:
    """Write the benchmark file."""
    from tprimat.analyze.metrics import run_metrics
    from tprimat.records.benchmark_file import benchmark_file_name, write_benchmark_file

    folder = Path() if options.log_file == "-" else Path(options.log_file).parent
    path = options.output or folder / benchmark_file_name(result.run)
    try:
        metrics = run_metrics(result.run, result.steps)
    except MetricError as error:
        print(f"no metrics: {error}", file=sys.stderr)
        metrics = None
    write_benchmark_file(path, result.run, result.steps, metrics)
    return path, metrics


def tell(result: "Extracted", metrics: "RunMetrics | None", path: Path) -> None:
    """Results on stdout, remarks on stderr."""
    from tprimat import units
    from tprimat.analyze.metrics import impossible

    run = result.run
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    if run.cause:
        print(f"{run.outcome.replace('_', ' ')}: {run.cause}", file=sys.stderr)
    for warning in impossible(metrics.mfu) if metrics else ():
        print(f"warning: {warning}", file=sys.stderr)
    if metrics is not None and metrics.mfu_absent_because:
        print(f"note: no MFU, since {metrics.mfu_absent_because}", file=sys.stderr)
    rate = metrics.tokens_per_second_per_gpu if metrics else None
    rows = (
        ("log", f"{run.engine}, {len(result.steps)} steps, {run.outcome.replace('_', ' ')}"),
        ("machine", f"{units.count(run.machine.gpus)} x {run.machine.accelerator or units.ABSENT} ({run.machine.platform})"),
        ("workload", f"{units.count(run.global_batch_sequences)} sequences of {units.count(run.sequence_tokens)} tokens a step"),
        (
            "step time",
            f"{units.seconds(metrics.step_seconds.value)} median of {metrics.window.steps}" if metrics else units.ABSENT,
        ),
        ("throughput", f"{units.count(rate.value)} tokens/s/GPU" if rate else units.ABSENT),
        ("MFU", units.percent(metrics.mfu.value) if metrics and metrics.mfu else units.ABSENT),
        ("written", str(path)),
    )
    print("\n".join(f"{label:<11} {value}" for label, value in rows))


if __name__ == "__main__":
    sys.exit(outlasting(main))
