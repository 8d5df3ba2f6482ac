"""One Markdown page about an accelerator, from its probes: how fast single operations and small training loops run."""

from collections.abc import Callable, Sequence

from tprimat.analyze import probes as figures
from tprimat.core import units
from tprimat.core.effort import MIN_SAMPLES_TO_SETTLE, Effort, reduced
from tprimat.core.flops import SEED_SHAPES
from tprimat.records.schema import ProbeRecord
from tprimat.report import probes as tables
from tprimat.report.probes import PLAIN, Probes, clock, of_kind, rate_of, shape_of, share

Section = tuple[str, str | Callable[[Probes], str], Callable[[Probes], str | None]]
"""Title, text or the function that makes it, and the function that makes the table."""


def seed_shapes_text(probes: Probes) -> str:
    """Say where the shapes come from, and whether they are scaled down."""
    shapes = {(probe.shape["m"], probe.shape["k"], probe.shape["n"]) for probe in tables.seed_products(probes)}
    text = "(m, k) times (k, n): shapes of Llama 70B under eight-way tensor parallelism and three squares, as in SemiAnalysis's "
    text += "comparison of 2024-12-22"
    scaled = shapes - set(SEED_SHAPES.values())
    if scaled:
        text += f", {'some with ' if scaled < shapes else ''}each side scaled down to about a 64th"
    return f"{text}. Averages are over the shapes of one table."


SECTIONS: tuple[Section, ...] = (
    ("Matrix multiplication", "Square products of standard normal matrices through `torch.matmul`.", tables.squares),
    (
        "A scan for the fastest product",
        "Many shapes are timed briefly, one after the other; the fastest is then measured again. Under a power limit, the clock, "
        "and so the ranking, depends on the preceding load. Training rates are therefore compared with the fastest product on "
        "this page, whichever table holds it.",
        tables.searched,
    ),
    (
        "Matrix multiplication at a language model's shapes",
        seed_shapes_text,
        tables.gemm,
    ),
    (
        "Products in rounds",
        "The same products in several rounds, each warm and under sustained load (on a GPU, 10 s of it before the first sample). "
        "The range between rounds, relative to their median, shows how far a single figure in the tables above may be off; the "
        "± there covers less.",
        tables.rounds,
    ),
    (
        "Calls and libraries",
        "The same product through two calls or two libraries. A difference is given where the two 95 % intervals do not overlap.",
        tables.libraries,
    ),
    (
        "Products of the trained models",
        "Forward products of one tensor-parallel rank. Brackets hold the share of the dense peak, where it is known.",
        tables.models,
    ),
    (
        "Attention",
        "Causal, bf16, 32 query heads, 8 key/value heads, head dimension 128; on a GPU 32,768 tokens at every sequence length. "
        "FLOP count half the square; the backward pass counts 2.5 times the forward pass.",
        tables.attention,
    ),
    ("Memory", "Each array that is read or written counts once, as in STREAM.", tables.memory),
    (
        "Collective operations",
        "Time of the slowest rank. Message sizes and bandwidths follow the definitions of nccl-tests.",
        tables.collectives,
    ),
    (
        "Three-layer network",
        "On a GPU 4096 to 8192 to 8192 to 4096, with ReLU; forward, backward and AdamW, all in bf16. Each weight and sample "
        "counts six FLOP.",
        tables.mlp,
    ),
    (
        "Transformer training: models",
        "GPT-2's structure with tied embeddings and a learned position for each token of the sequence; on a GPU, GPT-2's "
        "vocabulary of 50,257. Parameters include every weight: embeddings, norms and, as in GPT-2, the biases of linear "
        "layers. The published MI350X counts, `gpt-30m` to `gpt-13b` of `python3 -m tprimat models`, leave out those biases, "
        "which are less than 0.1 %.",
        tables.transformer_models,
    ),
    (
        "Transformer training: results",
        "Plain PyTorch on one device, without compilation or recomputation; weights, gradients and AdamW's states in bf16. "
        "6N counts six FLOP for each parameter and token. Causal counts the weights that multiply a token and half the attention "
        "square. Both shares are of the causal rate: of the data sheet's dense peak, and of the fastest product measured here.",
        tables.transformer_results,
    ),
    (
        "Data-parallel scaling",
        "The same training under DistributedDataParallel, with a constant batch per device.",
        tables.ddp,
    ),
)

PIECES: Section = (
    "Parts of a training step",
    "A step's prediction is the sum of these. Products are named as in training: forward (fprop), gradient of the input (dgrad), "
    "and gradient of the weight with its fp32 sum (wgrad). Grouped products belong to experts, with equal or skewed numbers of "
    "rows. Regions and launches count both passes. At full sizes each is measured for about 0.2 s; products under load first "
    "keep the device busy for 0.4 s.",
    tables.pieces,
)
"""Measured only on request, so a page without it is complete."""

HOST_CLOCK = "the host's clock"
OWN_RULES = "Searches, training steps and operations on several ranks have rules of their own."
NO_FLUSH = "except for training steps and memory operations, whose data exceeds it"
NEVER_FLUSHED = "The last-level cache is not overwritten between repetitions."
SMALL_SIZES = "Small sizes, the default on a CPU, show that everything runs, not how fast it is; `--full` measures full ones."


def caution(probes: Probes) -> list[str]:
    """Say that small sizes measure no speed, where there are some."""
    return [SMALL_SIZES] if any(map(figures.is_small, probes)) else []


def method(probes: Probes) -> str:
    """Say how the operations were timed, by the effort at each choice of sizes."""
    sizes = sorted({figures.is_small(probe) for probe in probes})
    names = {False: "At full sizes", True: "At small sizes"} if len(sizes) > 1 else {}
    on_cpu = probes[-1].machine.platform == "cpu"
    parts = ["All figures come from the samples in probes.jsonl."]
    parts += [f"Each repetition is timed with {HOST_CLOCK if on_cpu else 'device events'}."]
    parts += [rules(reduced(Effort(), small), names.get(small), small=small) for small in sizes]
    parts += ["Times are medians; ± is half the width of the 95 % interval over consecutive repetitions."]
    parts += [] if on_cpu else ["Peaks are the dense peaks of the data sheet."]
    return " ".join(parts)


def rules(effort: Effort, where: str | None, *, small: bool) -> str:
    """Describe warm-up, the end of repetitions, and the cache."""
    warmup = f"warm-up takes {effort.warmup} calls or {effort.warmup_seconds:g} s"
    text = f"{where}, {warmup}" if where else warmup.capitalize()
    text += f". There are {effort.at_least} to {effort.repetitions} repetitions, which end after {effort.seconds:g} s"
    if effort.relative_interval is not None and effort.repetitions > MIN_SAMPLES_TO_SETTLE:
        width = units.percent(effort.relative_interval, 0)
        text += f" or, from {MIN_SAMPLES_TO_SETTLE} on, once the 95 % interval of the median is narrower than {width}"
    text += f"; operations on several ranks always take all {effort.repetitions}. " if small else f". {OWN_RULES} "
    return text + (f"The last-level cache is overwritten before each repetition, {NO_FLUSH}." if effort.flush else NEVER_FLUSHED)


def page(probes: Sequence[ProbeRecord]) -> str:
    """Write the page about the accelerator, driver, power limit and torch version of the newest probe, from one probe or more."""
    return page_of(figures.newest_of_each(probes))


def page_of(chosen: Sequence[ProbeRecord], preface: str = "", appendix: str = "") -> str:
    """Write the page from selected probes, one for each operation at each size, between a preface and an appendix."""
    parts = [f"# What {chosen[-1].machine.accelerator or chosen[-1].machine.platform} reaches"]
    parts += [preface] if preface else []
    parts += [f"## System\n\n{tables.system(chosen)}", method(chosen), *caution(chosen)]
    parts += [] if chosen[-1].machine.platform == "cpu" else [f"## Summary\n\n{summary(chosen)}"]
    parts += sections(chosen)
    missing = [title for title, _, make in SECTIONS if make(chosen) is None]
    parts += ["Not measured yet: " + ", ".join(missing) + "."] if missing else []
    parts += [appendix] if appendix else []
    return "\n\n".join(parts) + "\n"


def sections(probes: Probes) -> list[str]:
    """Write the sections for which there are probes."""
    bodies = [(title, text, make(probes)) for title, text, make in (*SECTIONS, PIECES)]
    return [f"## {title}\n\n{text if isinstance(text, str) else text(probes)}\n\n{body}" for title, text, body in bodies if body]


def summary(probes: Probes) -> str:
    """List one sentence for each kind of operation; empty where nothing was measured."""
    return "\n".join(f"- {line}" for sentences in SENTENCES for line in sentences(probes))


def product_sentences(probes: Probes) -> list[str]:
    """Name the fastest product in the two dtypes that training multiplies in."""
    lines = []
    for dtype in ("bf16", "fp8"):
        best = figures.fastest_product(probes, dtype)
        mean = figures.mean_rate([p for p in of_kind(probes, "gemm") if p.dtype == dtype and p.variant in PLAIN])
        if best is None:
            continue
        text = f"Matrix products in {dtype} reach up to {rate_of(best)}, {share(best)} of the dense peak, at {shape_of(best)}"
        known = best.clock_hertz is not None or best.power_watts is not None
        text += f" ({clock(best)})" if known else ""
        lines.append(text + (f"; {units.teraflops(mean)} on average over the table's shapes." if mean else "."))
        lines += _search_sentence(probes, best)
    return lines


def _search_sentence(probes: Probes, best: ProbeRecord) -> list[str]:
    """Say why a faster reading of the search for a shape is not the fastest product: a search times briefly, on a cool GPU."""
    brief = figures.fastest([probe for probe in of_kind(probes, "gemm_search") if probe.dtype == best.dtype])
    if brief is None or figures.fastest([best, brief]) is best:
        return []
    again = figures.fastest([p for p in of_kind(probes, "gemm") if p.dtype == brief.dtype and p.shape == brief.shape])
    text = f"The search for a {best.dtype} shape read up to {rate_of(brief)} at {shape_of(brief)} in {len(brief.seconds)} calls"
    settled = f"; timed at length, that product reaches {rate_of(again)} ({clock(again)})" if again else ""
    return [f"{text} ({clock(brief)}){settled}. A search does not count."]


def attention_sentences(probes: Probes) -> list[str]:
    """Name the fastest backend, forward and backward."""
    lines = []
    for kind in ("attention_forward", "attention_backward"):
        best = figures.fastest(of_kind(probes, kind))
        if best:
            direction, backend = kind.removeprefix("attention_"), best.variant or units.ABSENT
            tokens = f"{best.shape['sequence']:,}"
            lines.append(f"Attention {direction} reaches up to {rate_of(best)}, with {backend} at {tokens} tokens.")
    return lines


def memory_sentences(probes: Probes) -> list[str]:
    """Name the fastest of the three access patterns."""
    shares = [(figures.share_of_bandwidth(probe), probe) for probe in of_kind(probes, "copy", "triad", "fill") if probe.seconds]
    best = max(((part, probe) for part, probe in shares if part is not None), key=lambda pair: pair[0], default=None)
    rate = figures.bandwidth(best[1]) if best else None
    if best is None or rate is None:
        return []
    part, probe = best
    return [f"Memory moves up to {units.si(rate, 'B/s')} ({probe.kind}), {units.percent(part)} of the data sheet."]


def collective_sentences(probes: Probes) -> list[str]:
    """Give the bus bandwidth of the largest all-reduce for each number of ranks."""
    measured = [probe for probe in of_kind(probes, "all_reduce") if probe.seconds]
    lines = []
    for ranks in sorted({probe.shape["ranks"] for probe in measured}):
        largest = max((p for p in measured if p.shape["ranks"] == ranks), key=lambda p: p.shape["message_bytes"])
        size, rate = units.message_size(largest.shape["message_bytes"]), units.si(figures.bus_bandwidth(largest), "B/s")
        lines.append(f"An all-reduce of {size} over {ranks} devices reaches a bus bandwidth of {rate} ({largest.variant}).")
    return lines


def training_sentences(probes: Probes) -> list[str]:
    """Name the transformer with the highest utilization, and relate it to the fastest product."""
    best = figures.fastest([probe for probe in of_kind(probes, "transformer_step") if probe.seconds])
    if best is None:
        return []
    text = f"A training step of the {best.variant} transformer reaches {rate_of(best)}, {share(best)} of the dense peak"
    measured = figures.share_of_fastest_product(best, probes)
    return [text + ("." if measured is None else f" and {units.percent(measured)} of the fastest product above.")]


def scaling_sentences(probes: Probes) -> list[str]:
    """Give the efficiency of data parallelism on the most devices."""
    lines = []
    steps = [probe for probe in of_kind(probes, "ddp_step") if probe.seconds]
    for name in dict.fromkeys(probe.variant for probe in steps):
        same = [probe for probe in steps if probe.variant == name]
        most = max(same, key=lambda probe: probe.shape["ranks"])
        efficiency, ranks = figures.scaling_efficiency(most, same), most.shape["ranks"]
        if efficiency is not None and ranks > 1:
            lines.append(f"Data-parallel training of {name} scales to {ranks} devices at {units.percent(efficiency)} efficiency.")
    return lines


SENTENCES: tuple[Callable[[Probes], list[str]], ...] = (
    product_sentences,
    attention_sentences,
    memory_sentences,
    collective_sentences,
    training_sentences,
    scaling_sentences,
)
