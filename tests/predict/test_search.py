"""The layouts that are searched are those that TPrimat's own plans accept, and they are ranked by their predictions."""

from dataclasses import fields

import pytest
from changes import replace
from plans import divide

from tprimat.core.accelerators import find_accelerator
from tprimat.core.errors import LayoutError
from tprimat.core.implementations import EMBEDDED, TRANSFORMER_ENGINE
from tprimat.core.models import model_shape
from tprimat.core.workload import FullWorkload
from tprimat.predict.memory import predict_memory
from tprimat.predict.rates import published_rates
from tprimat.predict.search import MOST_CHUNKS, LayoutQuestion, layouts, search, workloads
from tprimat.predict.time import predict_time
from tprimat.report.plan import reason

H100 = find_accelerator("H100 SXM")
QUESTION = {field.name for field in fields(LayoutQuestion)}


def question(**changes):
    asked = {"gpus": 16, "gpus_per_node": 8, "memory_bytes": H100.memory_bytes, "equal_stages": True}
    facts = {
        "shape": model_shape("llama-3.1-8b"),
        "global_batch_sequences": 32,
        "sequence_tokens": 2048,
        "implementation": EMBEDDED,
    }
    names = {"global_batch": "global_batch_sequences", "precision": "matmul_dtype"}
    for name, value in changes.items():
        (asked if name in QUESTION else facts)[names.get(name, name)] = value
    return LayoutQuestion(work=FullWorkload(**facts), **asked)


def accepted(asked, **degrees):
    """What plan/layout.py makes of some degrees; None where it refuses them."""
    data = {"sequence_length": asked.work.sequence_tokens, "global_batch_size": asked.work.global_batch_sequences}
    try:
        return divide(asked.work.shape, asked.gpus, data=data, **degrees)[0]
    except LayoutError:
        return None


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen-2.5-7b", "mixtral-8x7b"])
def test_every_legal_layout_is_searched_and_no_other(model):
    asked = question(shape=model_shape(model))
    tried = set(layouts(asked))
    degrees = (1, 2, 3, 4, 7, 8, 16)
    legal = set()
    for tensor in (1, 2, 4, 8):
        for pipeline in degrees:
            for virtual in [None, *(chunks for chunks in range(2, MOST_CHUNKS + 1))]:
                for context in degrees:
                    for expert in (1, 2, 4, 8):
                        layout = accepted(asked, tp=tensor, pp=pipeline, vpp=virtual, cp=context, ep=expert, micro_batch_size=1)
                        legal |= {layout} - {None}
    with_batch = {work.layout for work in workloads(asked) if work.micro_batch == 1}
    assert with_batch == legal
    assert with_batch <= tried


def test_every_micro_batch_is_one_that_a_plan_takes():
    asked = question()
    for work in workloads(asked):
        layout = work.layout
        chosen = {"tp": layout.tensor, "pp": layout.pipeline, "vpp": layout.virtual_pipeline, "cp": layout.context}
        assert accepted(asked, **chosen, micro_batch_size=work.micro_batch) == layout
        assert work.micro_batch * work.accumulation * layout.data == asked.work.global_batch_sequences


def test_the_ranking_is_by_time_and_what_is_too_large_says_by_how_much():
    answer = search(question(), published_rates(H100, 8))
    seconds = [candidate.step_seconds for candidate in answer.fitting]
    assert seconds == sorted(seconds)
    promised = int(0.99 * H100.memory_bytes)
    assert all(candidate.memory.device_bytes <= promised for candidate in answer.fitting)
    for candidate in answer.too_large:
        assert candidate.memory.device_bytes - candidate.missing_bytes == promised
        assert candidate.fit != "fits"
    best = answer.fitting[0]
    assert reason(best, best) == ""
    assert all(reason(candidate, best) for candidate in answer.fitting[1:])
    assert all(reason(candidate, best).endswith(" %") for candidate in answer.fitting[1:] if "+" in reason(candidate, best))
    fits = {candidate.degrees for candidate in answer.fitting}
    assert not fits & {candidate.degrees for candidate in answer.nearly()}


def test_what_fills_the_memory_to_within_the_noise_of_its_margin_is_too_tight():
    memory = search(question(), published_rates(H100, 8)).fitting[0].memory
    most = memory.device_bytes
    assert memory.expected_device_bytes < most
    assert (memory.fit(most), memory.fit(round(1.005 * most))) == ("too tight to promise", "too tight to promise")
    assert (memory.fit(round(1.011 * most)), memory.missing_bytes(round(1.011 * most))) == ("fits", 0)
    assert memory.missing_bytes(most) == most - int(0.99 * most)


def test_more_memory_loses_no_layout_and_recomputation_is_a_last_resort():
    small, large = (search(question(memory_bytes=size * 2**30), published_rates(H100, 8)) for size in (30, 80))
    fits = [{(one.workload.layout, one.workload.micro_batch) for one in answer.fitting} for answer in (small, large)]
    assert fits[0] < fits[1]
    assert large.fitting[0].workload.recompute == "none"
    assert large.fitting[0].time.step_seconds <= small.fitting[0].time.step_seconds


@pytest.mark.parametrize(
    ("model", "pipeline", "virtual", "ends"),
    [("llama-3.1-405b", 8, 8, (1, 1)), ("deepseek-v3", 8, 4, (1, 0)), ("deepseek-v3", 4, 4, (3, 2))],
)
def test_layouts_that_nvidia_publishes_for_layers_that_nothing_divides_are_searched(model, pipeline, virtual, ends):
    """Megatron-Bridge's recipes: the first and the last model chunk have fewer layers, beside embedding and output."""
    shape = model_shape(model)
    common = {"shape": shape, "gpus": 1024, "global_batch": 2048, "sequence_tokens": 4096, "implementation": TRANSFORMER_ENGINE}
    asked = question(**common, equal_stages=False)
    tensor_8 = [work for work in workloads(asked) if work.tensor_parallel == 8]
    tried = [work for work in tensor_8 if (work.pipeline_parallel, work.virtual_pipeline) == (pipeline, virtual)]
    assert tried
    for work in tried[:8]:
        first, *others, last = work.chunk_layers
        assert ((first, last), sum(work.chunk_layers)) == (ends, shape.layers)
        assert others == [others[0]] * (pipeline * virtual - 2)
        assert min(*predict_memory(work).parts.values(), *predict_time(work, published_rates(H100, 8)).parts.values()) >= 0
    assert all(work.chunk_layers is None for work in workloads(replace(asked, equal_stages=True)))


def test_only_as_many_layers_are_recomputed_as_memory_needs():
    """Llama 3.1 70B on eight MI300X: no layout fits without recomputation, and that of all layers is slower."""
    mi300x = find_accelerator("MI300X")
    asked = question(shape=model_shape("llama-3.1-70b"), gpus=8, memory_bytes=mi300x.usable_bytes, sequence_tokens=8192)
    fitting = search(asked, published_rates(mi300x, 8)).fitting
    best, other = fitting[0], next(candidate for candidate in fitting if candidate.workload.recompute_layers is None)
    layers = best.workload.recompute_layers
    assert best.time.step_seconds < other.time.step_seconds
    assert all(candidate.workload.recompute == "full" for candidate in fitting)
    fewer = replace(best.workload, recompute_layers=layers - 1)
    room = 0.95 * asked.memory_bytes
    assert best.memory.device_bytes <= room < predict_memory(fewer).device_bytes

    def refusal(_, work):
        return LayoutError("all or none", where="here") if work.recompute_layers else None

    whole = search(replace(asked, refusal=refusal), published_rates(mi300x, 8)).fitting
    assert {candidate.workload.recompute_layers for candidate in whole} == {None}, "an engine that recomputes all or none"
