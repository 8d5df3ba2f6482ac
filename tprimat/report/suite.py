"""One page about an accelerator, from records alone: what it reaches on bare operations and on small training loops."""

from collections.abc import Callable, Sequence

from tprimat.analyze.probes import newest_of_each
from tprimat.records.schema import ProbeRecord
from tprimat.report import probes, suite_tables
from tprimat.report.probes import Probes
from tprimat.report.suite_findings import in_short

Section = tuple[str, str, Callable[[Probes], str | None]]

SECTIONS: tuple[Section, ...] = (
    ("Matrix multiplication", "Square products of standard normal matrices through `torch.matmul`.", probes.squares),
    (
        "A scan for the fastest product",
        "Shapes tried briefly, one after the other, whose winner was then measured anew. Under a power limit the clocks, and so "
        "the winner, hang on what was multiplied before: training rates are held against the fastest product of this page, "
        "whichever table holds it.",
        probes.searched,
    ),
    (
        "Matrix multiplication at a language model's shapes",
        "(m, k) times (k, n): shapes of Llama 70B under eight-way tensor parallelism and three squares, as in SemiAnalysis's "
        "comparison of 2024-12-22. The average is over the shapes of a table.",
        probes.gemm,
    ),
    ("Calls and libraries", "The same product through two calls or two libraries.", probes.libraries),
    (
        "Products of the trained models",
        "Forward products of one tensor-parallel rank; in brackets, the share of the dense peak.",
        probes.models,
    ),
    (
        "Attention",
        "Causal, 32 query heads over 8 key/value heads, head width 128, bf16, 32,768 tokens at every length on a GPU. FLOP "
        "count half the square; backward 2.5 times forward.",
        probes.attention,
    ),
    ("Memory", "Each array that is read or written counts once, as in STREAM.", suite_tables.memory),
    (
        "Collective operations",
        "Time of the slowest rank; message sizes and bandwidths as nccl-tests defines them.",
        suite_tables.collectives,
    ),
    (
        "Three-layer network",
        "4096 to 8192 to 8192 to 4096 with ReLU on a GPU; forward, backward and AdamW, all in bf16. FLOP count six a weight and "
        "sample.",
        suite_tables.mlp,
    ),
    (
        "Transformer training: models",
        "GPT-2's structure and vocabulary of 50,257 on a GPU, tied embeddings, a learned position for each token of the "
        "sequence. The count holds every weight: tables, norms and, as in GPT-2, biases of the linear layers. The published "
        "MI350X counts, `gpt-30m` to `gpt-13b` of `python -m tprimat.cli.models`, leave those biases out: under 0.1 % fewer.",
        suite_tables.transformer_models,
    ),
    (
        "Transformer training: results",
        "Plain PyTorch on one device, nothing compiled, no recomputation; weights, gradients and AdamW's states in bf16. "
        "6N counts six FLOP for each parameter and token; causal counts the weights that are multiplied and half the attention "
        "square, and both shares are of that: of the data sheet's dense peak, and of the fastest product measured here.",
        suite_tables.transformer_results,
    ),
    (
        "Data-parallel scaling",
        "The same training under DistributedDataParallel, the batch of a device kept.",
        suite_tables.ddp,
    ),
)

METHOD = """Every figure comes from the samples in probes.jsonl: device events around each repetition after a warm-up (30 calls,
or 0.3 s of them), up to 200 repetitions or until the 95 % interval of the median is under 1 % or a second has passed, the
last-level cache overwritten before each repetition, except around training steps and memory, whose data exceeds it. Times are
medians; ± is half the width of the 95 % interval. The peaks are the data sheet's dense ones."""


SMALL = "On a processor the sizes are small unless `--full` asks otherwise: they show that everything runs and measure little."


def page(probes: Sequence[ProbeRecord], appendix: Sequence[str] = (), preface: str = "") -> str:
    """Markdown; about the accelerator, driver, power limit and torch version of the newest probe.

    Args:
        probes: of any kind; without any there are only the further sections.
        appendix: further sections, ready made.
        preface: stands before everything else.
    """
    return page_of(newest_of_each(probes), appendix, preface)


def page_of(chosen: Sequence[ProbeRecord], appendix: Sequence[str] = (), preface: str = "") -> str:
    """The same of probes that were chosen before: each operation at each size once."""
    name = (chosen[-1].machine.accelerator or chosen[-1].machine.platform) if chosen else "this machine"
    parts = [f"# What {name} reaches", *filter(None, [preface])]
    if chosen:
        parts += [f"## System\n\n{suite_tables.system(chosen)}", METHOD]
        parts += [SMALL] if chosen[-1].machine.platform == "cpu" else [f"## In short\n\n{in_short(chosen)}"]
        parts += sections(chosen)
        missing = [title for title, _, make in SECTIONS if make(chosen) is None]
        parts += ["Not measured yet: " + ", ".join(missing) + "."] if missing else []
    return "\n\n".join([*parts, *appendix]) + "\n"


def sections(probes: Sequence[ProbeRecord]) -> list[str]:
    """Those about which something was measured."""
    made = [(title, text, make(probes)) for title, text, make in SECTIONS]
    return [f"## {title}\n\n{text}\n\n{body}" for title, text, body in made if body]
