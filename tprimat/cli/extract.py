"""Turn a training log of Primus, Megatron-LM or another known framework into a benchmark file."""

import argparse
from pathlib import Path

from tprimat.cli.common import positive
from tprimat.logs.parse import NAMES

LOG_HELP = f"the log, plain or gzipped, of {', '.join(NAMES)}; - for standard input"
MODEL_HELP = "llama, qwen, another model of config.yaml or of the table, or auto: as the log's arguments describe it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--log-file", required=True, metavar="PATH", help=LOG_HELP)
    parser.add_argument("--model-name", required=True, metavar="NAME", help=MODEL_HELP)
    parser.add_argument("--num-gpus", type=positive, metavar="N", help="GPUs on all nodes (default: from the log)")
    parser.add_argument("--num-nodes", type=positive, metavar="N", help="nodes (default: 1 for up to 8 GPUs)")
    parser.add_argument("--global-batch-size", type=positive, metavar="N", help="sequences per step (default: from the log)")
    parser.add_argument("--sequence-length", type=positive, metavar="N", help="tokens per sequence (default: from the log)")
    parser.add_argument("--gpu", metavar="NAME", help="the accelerator that ran (default: from the log, never this machine's)")
    parser.add_argument("--output", type=Path, metavar="PATH", help="default: benchmark_PLATFORM_MODEL.json next to the log")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, 1 where the log shows a failed run."""
    from tprimat.config.load import plain_name
    from tprimat.logs.contents import Claims
    from tprimat.runner.extraction import extract_log

    claims = Claims(
        model=plain_name(options.model_name, "--model-name"),
        gpus=options.num_gpus,
        nodes=options.num_nodes,
        global_batch_sequences=options.global_batch_size,
        sequence_tokens=options.sequence_length,
        accelerator=options.gpu,
    )
    return extract_log(options.log_file, claims, output=options.output)
