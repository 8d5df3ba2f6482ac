"""Predictions of training runs that others published, from data sheets and published rates alone.

A row is one of tprimat/data/published.yaml, or a line of JSON with the fields source, url, date, framework, version, model,
accelerator, gpus, dtype, sequence, micro_batch, global_batch, tp, pp, vpp, cp, ep, routing, tokens_per_second_per_gpu,
tflops_as_published, convention and note.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tprimat.core.accelerators import Accelerator, find_accelerator, peak_flops
from tprimat.core.errors import ConfigError, RecordError
from tprimat.core.flops import flop_per_token
from tprimat.core.implementations import FSDP, MEGATRON_FSDP, MEGATRON_TUNED, TRANSFORMER_ENGINE, Implementation
from tprimat.core.models import ModelShape, model_shape
from tprimat.core.published import PublishedResult, facts_of, rebase, results
from tprimat.core.workload import FORMATS, FullWorkload, Workload
from tprimat.engines import bridge
from tprimat.predict import Prediction, predict
from tprimat.predict.calibration import Expected, expected, figures, shift_of, traits_of
from tprimat.predict.search import short_ends

GPUS_OF_A_NODE = 8
KEYS = {
    "tensor_parallel": "tp",
    "pipeline_parallel": "pp",
    "virtual_pipeline": "vpp",
    "context_parallel": "cp",
    "expert_parallel": "ep",
    "micro_batch_sequences": "micro_batch",
    "global_batch_sequences": "global_batch",
    "sequence_tokens": "sequence",
}
"""Fact of a workload -> key of a row of JSON."""
MOST = 1e8
"""No row has more GPUs, tokens or sequences."""
MICRO_BATCHES, CHUNKS = (1, 2, 4, 8), (2, 3, 4, 5, 6, 7, 8, 12)
"""Of what a source leaves out."""
MODULES = ("layernorm", "mla_up_proj", "mlp", "moe_act")
"""What NVIDIA's recipes compute again first."""

AUTOMODEL = replace(FSDP, name="NeMo Automodel", attends_by_torch=False, selects_operations=False, dispatches_once_a_node=True)
"""Its benchmarks: FSDP2, Transformer Engine's attention, DeepEP; weights, gradients and moments are bf16."""
PRIMUS_TUNED = replace(
    MEGATRON_TUNED, name="Primus", reduces_in_fp32=True, keeps_fp8_weights_alone=False, dispatches_once_a_node=False
)
"""The same as Megatron-LM's own defaults have it: gradients in fp32, weights in 8 bits besides those in bf16."""
PRIMUS_SHARDED = replace(FSDP, name="Primus", attends_by_torch=False, selects_operations=False)
"""Megatron-LM's use_torch_fsdp2 around the same layers."""


@dataclass(frozen=True, slots=True)
class Framework:
    """How a published run of a framework is understood where its source does not say."""

    names: str
    """A regular expression of its names, in lower case."""
    whole: Implementation
    """With all weights on each replica; FSDP where it does not have that."""
    sharded: Implementation
    """With weights split over replicas."""
    balances: bool
    """Its published mixtures are balanced by force."""
    recomputes_dense: bool = False
    """Its published dense models compute all layers again."""


MEGATRON_IN_FP32 = replace(MEGATRON_TUNED, reduces_in_fp32=True)
FRAMEWORKS = (
    Framework("automodel", AUTOMODEL, AUTOMODEL, balances=True, recomputes_dense=True),
    Framework(
        "torchtitan|maxtext|fsdp|deepspeed|torchtune|nanotron|axolotl|transformers|foundry|composer|litgpt",
        FSDP,
        FSDP,
        balances=False,
    ),
    Framework("primus", PRIMUS_TUNED, PRIMUS_SHARDED, balances=True),
    Framework("bridge|nemo|dgx", MEGATRON_TUNED, MEGATRON_FSDP, balances=True),
    Framework("", MEGATRON_IN_FP32, replace(MEGATRON_FSDP, reduces_in_fp32=True), balances=False),
)
"""The first whose names match counts. Balance: docs/performance-summary of Megatron-Bridge and of Automodel; Primus
examples/megatron/configs. Recomputation: activation_checkpointing in Automodel's examples/llm_benchmark."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a recipe of NVIDIA's does that no published table says."""

    shape: str
    accelerators: str
    """Regular expressions; formats likewise."""
    formats: str = "."
    since: str = ""
    """Year and month of the release."""
    graph: bool = False
    """One CUDA graph holds the whole step, and tokens travel to experts beside products; only with a forced balance."""
    overlaps: bool = False
    """Tokens travel to experts beside products (overlap_moe_expert_parallel_comm)."""
    recompute: tuple[str, ...] | None = None
    once_a_node: bool = True
    """The dispatcher is DeepEP or HybridEP, not alltoall."""


RELEASES = ("2026-01", "2026-04")
"""From which on NVIDIA's software has been faster."""
RECIPES = (
    Recipe("qwen3-30b", "GB[23]00|B300", "mxfp8", "2026-06", graph=True, recompute=()),
    Recipe("qwen3-235b", "GB[23]00", "mxfp8", "2026-06", graph=True, recompute=()),
    Recipe("gpt-oss", "GB[23]00", "mxfp8", "2026-06", graph=True, recompute=()),
    Recipe("deepseek-v3", "GB200", "mxfp8", "2026-06", graph=True, recompute=("mla_up_proj",)),
    Recipe("deepseek-v3", "GB300", "mxfp8", "2026-06", graph=True, recompute=()),
    Recipe("qwen3-30b", "H100", "bf16", "2026-06", overlaps=True, recompute=()),
    Recipe("qwen3-235b", "H100", overlaps=True, recompute=(), once_a_node=False),
    Recipe("qwen3", ".", recompute=()),
    Recipe("deepseek-v3", "H100", since="2026-02", recompute=("mla_up_proj", "mlp")),
    Recipe("deepseek-v3", "H100", overlaps=True, recompute=("mla_up_proj", "mlp")),
    Recipe("deepseek-v3", "GB200", "fp8", "2026-02", recompute=("mlp",)),
    Recipe("deepseek-v3", "GB300", "bf16", recompute=("moe_act",)),
    Recipe("deepseek-v3", "B200", "mxfp8", "2026-04", overlaps=True, recompute=("mla_up_proj", "mlp")),
    Recipe("deepseek-v3|kimi-k2", ".", recompute=("mla_up_proj",)),
    Recipe("gpt-oss", "GB200", "bf16", "2026-04", overlaps=True, recompute=("layernorm", "moe_act"), once_a_node=False),
    Recipe("gpt-oss", "B300", recompute=(), since="2026-04"),
    Recipe("gpt-oss", "GB200|B200|H100", recompute=("layernorm", "moe_act"), once_a_node=False),
)
"""The first that matches counts. scripts/performance/configs of Megatron-Bridge 0.2.0 to 0.5.1, perf_recipes of 0.6.0."""


def framework_of(name: str | None) -> Framework:
    """Return how a published run of a framework is understood."""
    return next(one for one in FRAMEWORKS if re.search(one.names, (name or "").lower()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedScore:
    """What was measured, in seconds, and what is predicted for it."""

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative, signed: 0.05 is predicted 5 % too high."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """The prediction of a row, with what its source leaves out chosen."""

    workload: FullWorkload
    accelerator: Accelerator
    prediction: Prediction
    fits: bool
    """By allocated memory: the run did fit."""
    older: frozenset[str] = frozenset()
    """Traits of its software, if it is older than what would run now."""

    @property
    def traits(self) -> frozenset[str]:
        """What its error is expected to share with others'."""
        return traits_of(self.workload, self.accelerator, _node(self.workload)) | self.older

    def expected(self) -> Expected:
        """Return the step with its interval."""
        slower = math.exp(shift_of(self.older, figures()["published"]["effects"]))
        usual = expected(self.workload, self.accelerator, _node(self.workload))
        return usual.of(slower * self.prediction.time.step_seconds)


@cache
def guesses() -> tuple[tuple[PublishedResult, float, Guess], ...]:
    """Return each published throughput whose model, accelerator, batch and layout are stated, in tokens/s/GPU, with its guess."""
    answered = []
    for result in results():
        measured = tokens_per_second(result)
        try:
            guess = guess_of(result)
        except RecordError:
            continue
        peak = peak_flops(result.accelerator, result.workload.matmul_dtype) or math.inf
        whole = 0.0 if measured is None else measured * flop_per_token(guess.workload.shape, guess.workload.sequence_tokens)
        if measured is not None and whole < peak:  # else the source contradicts itself
            answered.append((result, measured, guess))
    return tuple(answered)


@cache
def score_published() -> tuple[PublishedScore, ...]:
    """Score each of them in seconds per token and GPU, without any correction."""
    return tuple(
        PublishedScore(name=result.name, measured=1 / measured, predicted=1 / guess.prediction.time.tokens_per_second_per_gpu)
        for result, measured, guess in guesses()
    )


def tokens_per_second(result: PublishedResult) -> float | None:
    """Return tokens/s/GPU as printed, else from the printed FLOP/s or MFU."""
    if result.tokens_per_second_per_gpu:
        return result.tokens_per_second_per_gpu
    causal = rebase(result).flops_per_second_per_gpu
    shape, tokens = result.workload.shape, result.workload.sequence_tokens
    return None if causal is None or shape is None or tokens is None else causal / flop_per_token(shape, tokens)


def guess_of(result: PublishedResult) -> Guess:
    """Predict a row. Of what its source leaves out, the fastest that fits counts, and of recomputation the least that fits.

    Raises:
        RecordError: something is missing, or makes no sense.
    """
    accelerator = find_accelerator(result.accelerator)
    if accelerator is None:
        raise _missing(result, f"The accelerator {result.accelerator} is not in the table.")
    best: Guess | None = None
    for options in _options(result, accelerator):
        for work in options:  # the least recomputation that fits
            if best is not None and best.fits and work.code.shards_weights > best.workload.code.shards_weights:
                break  # sharded only where whole weights do not fit
            guess = Guess(workload=work, accelerator=accelerator, prediction=predict(work, accelerator, _node(work)), fits=False)
            guess = replace(guess, fits=guess.prediction.memory.allocated_bytes <= accelerator.usable_bytes)
            if best is None or _rank(guess) > _rank(best):
                best = guess
            if guess.fits:
                break
    if best is None:
        raise _missing(result, "No layout of these degrees divides its GPUs and its batch.")
    return replace(best, older=_older(result))


def _older(result: PublishedResult) -> frozenset[str]:
    """Return the traits of older releases of NVIDIA's software, which has become faster."""
    if framework_of(result.engine).whole is not MEGATRON_TUNED or not result.workload.shape:
        return frozenset()
    family = "experts" if result.workload.shape.experts else "dense"
    return frozenset(f"before {since}, {family}" for since in RELEASES if (result.date or since) < since)


def _rank(guess: Guess) -> tuple[bool, float]:
    fits = guess.fits
    return fits, guess.prediction.time.tokens_per_second_per_gpu if fits else -guess.prediction.memory.allocated_bytes


def _node(work: FullWorkload) -> int:
    return min(GPUS_OF_A_NODE, work.world_size)


def _missing(result: PublishedResult, why: str) -> RecordError:
    return RecordError(f"The row {result.name} cannot be predicted.", where=result.name, why=why)


def _options(result: PublishedResult, accelerator: Accelerator) -> Iterator[Iterator[FullWorkload]]:
    """Yield for each way to fill in a row's layout its workloads, with more and more recomputation."""
    known, gpus = result.workload, result.gpus
    shape, batch, tokens, dtype = known.shape, known.global_batch_sequences, known.sequence_tokens, known.matmul_dtype
    if shape is None or tokens is None or gpus is None or dtype is None:
        raise _missing(result, "It does not say all of model, sequence, GPUs and dtype.")
    if dtype not in accelerator.dense_flops:
        raise _missing(result, f"{accelerator.name} does not multiply {dtype}.")
    tensor, pipeline, context = (
        getattr(known, name) or 1 for name in ("tensor_parallel", "pipeline_parallel", "context_parallel")
    )
    stated = facts_of(result)
    if stated is None:
        raise _missing(result, f"TP{tensor} PP{pipeline} CP{context} do not divide {gpus} GPUs.")
    data = stated["data_parallel"]
    batch = batch or data * (known.micro_batch_sequences or 1) * (4 * pipeline if pipeline > 1 else 1)
    chunks = [known.virtual_pipeline or 1]
    if pipeline > 1 and known.virtual_pipeline is None:
        chunks += [count for count in CHUNKS if shape.layers // pipeline % count == 0]
    for code in _implementations(result):
        facts = stated | {
            "routing": _routing(result, shape),
            **({"optimizer_states": "bf16"} if code.name == AUTOMODEL.name else {}),
            "implementation": code,
        }
        for micro in [known.micro_batch_sequences] if known.micro_batch_sequences else MICRO_BATCHES:
            if batch < data * micro:
                continue
            facts |= {"micro_batch_sequences": micro, "global_batch_sequences": batch // (data * micro) * data * micro}
            for count in chunks:
                ends = _ends(shape.layers, pipeline * count, known.mtp_layers or 0) if pipeline > 1 else None
                virtual = {"virtual_pipeline": count if count > 1 else None, "chunk_layers": ends}
                yield _recomputing(FullWorkload(**facts | virtual), result)


def _ends(layers: int, chunks: int, mtp_layers: int) -> tuple[int, ...] | None:
    """Return the layers of model chunks; those that predict further tokens take the place of layers of the last one."""
    each = -(-layers // chunks)
    if mtp_layers and 0 < each * chunks - layers < each:
        return (*[each] * (chunks - 1), layers - each * (chunks - 1))
    return short_ends(layers, chunks)


def _implementations(result: PublishedResult) -> list[Implementation]:
    """Return what may have run: where weights can be split over replicas and the source does not say, that comes second.

    Over pipeline stages, weights stay gathered for all micro-batches.
    """
    framework, work, note = framework_of(result.engine), result.workload, (result.notes or "").lower()
    recipe, whole, sharded = _recipe(result), framework.whole, framework.sharded
    if recipe is not None:
        whole = replace(
            whole,
            graphs_balanced_steps=recipe.graph,
            overlaps_experts=recipe.overlaps,
            dispatches_once_a_node=recipe.once_a_node,
        )
    if re.search(r"all-?to-?all", note):
        whole = replace(whole, dispatches_once_a_node=False)
    if re.search(r"deep-?ep|hybrid-?ep", note):
        whole, sharded = (replace(code, dispatches_once_a_node=True) for code in (whole, sharded))
    if whole.call_seconds and _runs_eagerly(result, note):
        whole = replace(whole, call_seconds=TRANSFORMER_ENGINE.call_seconds)
    if re.search(r"overlap off|without overlap", note):
        whole = replace(whole, overlaps_experts=False)
    if re.search(r"\beager\b|not compiled", note):
        sharded = replace(sharded, eager_layers=True, fused_activation=False, loss="native", optimizer="eager")
    if re.search(r"async[- ]?tp\b|asynctp", note):
        sharded = replace(sharded, overlaps_tensor_parallel=True)
    if (work.pipeline_parallel or 1) > 1:
        return [replace(sharded if work.weights_split_over else whole, shards_weights=False)]
    return [sharded] if work.weights_split_over else [whole, sharded]


def _runs_eagerly(result: PublishedResult, note: str) -> bool:
    """Whether a recipe is not one of those that are tuned for speed, which force the balance and launch CUDA graphs."""
    natural = result.workload.shape is not None and _routing(result, result.workload.shape) == "natural"
    tuned = re.search(r"graph|deep-?ep|hybrid-?ep", note)
    return not tuned and (natural or re.search(r"\bsft\b|functional|fine-?tun|packed", note) is not None)


def _recipe(result: PublishedResult) -> Recipe | None:
    """Return NVIDIA's recipe behind a row of Megatron-Bridge."""
    work, routing = result.workload, _routing(result, result.workload.shape) if result.workload.shape else None
    if bridge.ENGINE.name not in (result.engine or "").lower() or routing is None:
        return None
    kind = work.fp8_scaling if work.fp8_scaling in {"mxfp8", "nvfp4"} else work.matmul_dtype or ""
    for one in RECIPES:
        words = ((one.shape, result.shape), (one.accelerators, result.accelerator), (one.formats, kind))
        runs = (result.date or "") >= one.since and (routing == "balanced" or not (one.graph or one.overlaps))
        if runs and all(re.search(rf"(?<![A-Z])(?:{pattern})", word or "") for pattern, word in words):
            return one
    return None


def _routing(result: PublishedResult, shape: ModelShape) -> str | None:
    if not shape.experts:
        return None
    return result.workload.routing or ("balanced" if framework_of(result.engine).balances else "natural")


def _recomputing(work: FullWorkload, result: PublishedResult) -> Iterator[FullWorkload]:
    if result.workload.recompute is not None:
        yield work
        return
    recipe = _recipe(result)
    if framework_of(result.engine).recomputes_dense and not work.shape.experts:
        yield replace(work, recompute="full")
        return
    if recipe is not None and recipe.recompute:
        yield replace(work, recompute="selective", recompute_modules=recipe.recompute)
    else:
        yield replace(work, recompute="none")
    yield replace(work, recompute="selective", recompute_modules=MODULES)
    layers = work.shape.layers // (work.layout.pipeline * (work.virtual_pipeline or 1))
    for count in sorted({max(1, layers // 8), max(1, layers // 4), max(1, layers // 2)}):
        yield replace(work, recompute="full", recompute_layers=count)
    yield replace(work, recompute="full")


# Rows that others bring.


def result_of(row: Mapping[str, Any], number: int) -> PublishedResult:
    """Return a row of JSON as a published result.

    Raises:
        RecordError: its model or dtype is not known, or a value has the wrong type.
    """
    name = f"{row.get('source') or 'row'} {number}: {row.get('model')} on {row.get('gpus')} {row.get('accelerator')}"
    note = " ".join(str(row.get(key) or "") for key in ("note", "framework", "version"))
    try:
        model, note = _in_brackets(str(row.get("model")), note)
        shape = model_shape(model)
        dtype, scaling = format_of(str(row.get("dtype") or "bf16"))
        facts = {fact: number for fact, key in KEYS.items() if (number := _number(row.get(key))) is not None}
        if not shape.experts:
            facts.pop("expert_parallel", None)
        if re.search(r"\blora\b|\bpeft\b", note, re.IGNORECASE):
            raise ConfigError("It trains adapters.", why="LoRA leaves most weights as they are, which is not predicted.")
    except ConfigError as error:
        raise RecordError(error.what, where=name, why=f"{error.what} {error.why or ''}".strip()) from error
    except (TypeError, ValueError) as error:
        raise RecordError(f"Row {number} cannot be read.", where=name, why=str(error)) from error
    printed, rate = (real(row.get(key)) for key in ("tflops_as_published", "tokens_per_second_per_gpu"))
    further = _predicts_further(shape, facts.get("sequence_tokens"), printed, rate, note)
    facts |= {"mtp_layers": 1} if further else {}
    if "titan" in str(row.get("framework")).lower() and facts.get("pipeline_parallel", 1) > 1:
        _split_local_batch(facts, _number(row.get("gpus")), _date(row) or "", note)
    facts |= _said(note, str(row.get("routing") or ""))
    work = Workload(shape=shape, matmul_dtype=dtype, fp8_scaling=scaling, **facts)
    return PublishedResult(
        name=name,
        source=str(row.get("source")),
        date=_date(row),
        engine=None if row.get("framework") is None else str(row["framework"]),
        accelerator=_accelerator(str(row.get("accelerator") or "")),
        gpus=_number(row.get("gpus")),
        model=str(row.get("model")),
        workload=work,
        tokens_per_second_per_gpu=rate,
        notes=note,
    )


def _in_brackets(model: str, note: str) -> tuple[str, str]:
    """Return a model's name without what its source adds in brackets, and the note with it."""
    added = re.findall(r"\(([^)]*)\)", model)
    return re.sub(r"\s*\([^)]*\)", "", model).replace("×", "x").strip(), " ".join([note, *added])


def _predicts_further(shape: ModelShape, tokens: int | None, printed: Any, rate: Any, note: str) -> bool:
    """Whether a layer of multi-token prediction ran: the source says so, or the FLOP that it prints contain one."""
    if said := re.search(r"\bw/(o)? MTP|\bwith(out)? MTP", note, re.IGNORECASE):
        return not (said[1] or said[2])
    if not (shape.router_bias and tokens and printed and rate):
        return False
    extra = printed * 1e12 / rate / flop_per_token(shape, tokens) - 1
    return 0.5 < extra * shape.layers < 3.5  # the layer, and the output layer once more


def _split_local_batch(facts: dict[str, Any], gpus: int | None, date: str, note: str) -> None:
    """Read torchtitan's local batch: before 2025-04 it was split into as many micro-batches as stages, since then into sequences.

    Defaults of pipelining_utils.py at 9dec370, and since 5e2033c. An interleaved schedule has two chunks a rank.
    """
    ranks = math.prod(facts.get(name, 1) for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"))
    local = facts.get("micro_batch_sequences", 1)
    facts["global_batch_sequences"] = facts.get("global_batch_sequences") or local * max(1, (gpus or ranks) // ranks)
    facts["micro_batch_sequences"] = max(1, local // facts["pipeline_parallel"]) if date < "2025-04" else 1
    if "interleaved" in note.lower():
        facts.setdefault("virtual_pipeline", 2)


def _number(value: Any) -> int | None:
    """Return a degree or a size; None where a source writes that there is none, such as n/a or -1.

    Raises:
        ValueError: it is neither, or out of range.
    """
    text = str(value or "").strip().lower().replace(",", "")
    if text in {"", "n/a", "na", "none", "-", "null"}:
        return None
    if not abs(number := float(text)) < MOST:
        raise ValueError(f"{value!r} is out of range")
    return int(number) if number >= 0 else None


def real(value: Any) -> float | None:
    """Return a measured figure above 0; None for anything else."""
    try:
        number = float(str(value).replace(",", ""))
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _date(row: Mapping[str, Any]) -> str | None:
    """Return year and month of a row's container, such as 26.06 of NVIDIA's, else of its source."""
    released = re.search(r"\b(2[4-9])\.(0[1-9]|1[0-2])\b", str(row.get("version") or ""))
    if released:
        return f"20{released[1]}-{released[2]}"
    return None if row.get("date") is None else str(row["date"])


def _accelerator(words: str) -> str:
    """Return the device that a publisher's words name: without the system around it, such as DGX-GB200 or GB200 NVL72."""
    plain = re.sub(
        r"\b(dgx|hgx|nvl ?\d+|nvidia|amd|instinct|gpus?|\d+ ?x|x ?\d+|\d+ ?w)\b|[(),]",
        " ",
        words.replace("-", " "),
        flags=re.IGNORECASE,
    )
    series = re.search(r"\b(?:GB|GH|MI|[ABHV])\d+[A-Z]*\b", plain, re.IGNORECASE)
    short = series[0] if series else ""
    memory = "HBM2e" if re.search(r"hbm2e|\b96 ?gb|500 ?w", words, re.IGNORECASE) else ""
    names = [words, " ".join(plain.split()), f"{short} {memory}", short]
    return next((name for name in names if find_accelerator(name)), words)


def format_of(words: str) -> tuple[str, Any]:
    """Return dtype and scaling of what a publisher calls a precision, such as "FP8-CS", "MXFP8" or "float8 rowwise".

    Raises:
        ConfigError: it is not known.
    """
    text = words.lower().replace("float", "fp").replace("_", "-")
    for pattern, name in (
        (r"nvfp4|nv-?fp4|fp4-nv", "nvfp4"),
        (r"mxfp4|fp4", "mxfp4"),
        (r"mxfp8|fp8-?mx|mx-?fp8", "mxfp8"),
        (r"block|fp8-?sc\b|subchannel", "fp8-blockwise"),
        (r"fp8", "fp8"),
        (r"bf16|bfp16", "bf16"),
        (r"fp16|half", "fp16"),
    ):
        if re.search(pattern, text):
            return FORMATS[name]
    raise ConfigError(f"The precision {words!r} is not known.", fix=", ".join(FORMATS))


def _said(note: str, routing: str) -> dict[str, Any]:
    """Return the facts that the words of a row state."""
    facts: dict[str, Any] = {}
    if re.search(r"(?<!no )(?<!without )\bfsdp2?\b(?! ?= ?0)|\bhsdp\b|zero-?3|fully.sharded", note, re.IGNORECASE):
        facts["weights_split_over"] = 1  # at least: how many replicas follows from the layout
    again = r"full (activation )?(re-?comp|checkpoint|ac\b)|full-?ac\b|(re-?compute|checkpointing|\bac)[ :=]+full"
    if re.search(again, note, re.IGNORECASE):
        facts["recompute"] = "full"
    elif re.search(r"selective|\bsac\b", note, re.IGNORECASE):
        facts["recompute"] = "selective"
    elif re.search(r"no (activation )?(re-?comp|checkpoint|ac\b)", note, re.IGNORECASE):
        facts["recompute"] = "none"
    if re.search(r"token-?drop(?!less)", note, re.IGNORECASE):
        facts["expert_capacity"] = 1.0
    if re.search(r"(?<!interleaved )\b1f1b(?!-interleaved)", note, re.IGNORECASE):
        facts["virtual_pipeline"] = 1
    if re.search("nat|real|learn", routing, re.IGNORECASE):
        facts["routing"] = "natural"
    elif re.search("forc|balanc|uniform|fake", routing, re.IGNORECASE):
        facts["routing"] = "balanced"
    return facts
