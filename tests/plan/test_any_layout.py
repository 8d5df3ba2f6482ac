"""Properties of every layout: what is resolved keeps all rules, and what is refused breaks the rule that the error names."""

from changes import replace
from hypothesis import given, settings
from hypothesis import strategies as st

from tprimat.config.schema import DataConfig, LayoutConfig
from tprimat.core.errors import LayoutError
from tprimat.core.models import model_shape, padded_vocabulary, tiny, valid_tensor_degrees
from tprimat.plan.layout import LayoutRequest, resolve

DENSE, SPARSE = tiny(model_shape("llama-3.1-8b")), tiny(model_shape("mixtral-8x7b"))
DEGREES = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 8])
MAYBE = st.one_of(st.none(), st.none(), DEGREES)


@st.composite
def shapes(draw):
    kv_heads = draw(st.sampled_from([1, 2, 4, 6, 8]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    shape = draw(st.sampled_from([DENSE, SPARSE]))
    sizes = {"layers": draw(st.sampled_from([2, 6, 8, 32])), "ffn": draw(st.sampled_from([96, 128, 192]))}
    sizes |= {"context_tokens": draw(st.sampled_from([64, 256])), "vocabulary": draw(st.sampled_from([500, 512, 1000]))}
    return replace(shape, heads=heads, kv_heads=kv_heads, hidden=heads * shape.head_dim, **sizes)


LAYOUTS = st.builds(
    LayoutConfig,
    tensor_model_parallel_size=DEGREES,
    pipeline_model_parallel_size=DEGREES,
    virtual_pipeline_model_parallel_size=MAYBE,
    context_parallel_size=DEGREES,
    expert_model_parallel_size=DEGREES,
    sequence_parallel=st.sampled_from(["auto", "auto", True, False]),
    data_parallel_size=MAYBE,
    gradient_accumulation_steps=MAYBE,
    micro_batch_size=MAYBE,
)
BATCHES = st.builds(
    DataConfig,
    micro_batch_size=st.sampled_from([1, 2, 4]),
    global_batch_size=st.sampled_from([1, 8, 16, 24, 48, 64, 128]),
    sequence_length=st.sampled_from([1, 48, 64, 96, 128]),
)
RANKS = st.sampled_from([1, 2, 4, 6, 8, 16, 32, 64])


@st.composite
def requests(draw):
    """Any combination, half of them with ranks that hold whole replicas: most others fail there."""
    layout, factor = draw(LAYOUTS), draw(st.sampled_from([1, 2, 4]))
    ranks = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.context_parallel_size * factor
    return LayoutRequest(
        shape=draw(shapes()),
        layout=layout,
        data=draw(BATCHES),
        world_size=draw(st.one_of(st.just(ranks), RANKS)),
        where_layout=lambda key: f"layout {key}",
        where_data=lambda key: f"data {key}",
    )


def broken_rules(request):
    """The places of all rules that a request breaks, written down without the code under test."""
    shape, layout, data, ranks = request.shape, request.layout, request.data, request.world_size
    tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    virtual, context = layout.virtual_pipeline_model_parallel_size, layout.context_parallel_size
    replicas, rest = divmod(ranks, tensor * pipeline * context)
    if rest:
        yield max(
            (tensor, "layout tensor_model_parallel_size"),
            (pipeline, "layout pipeline_model_parallel_size"),
            (context, "layout context_parallel_size"),
            key=lambda degree: degree[0],
        )[1]
    if any(count % tensor for count in (shape.heads, shape.kv_heads, shape.ffn, padded_vocabulary(shape))):
        yield "layout tensor_model_parallel_size"
    if shape.layers % pipeline:
        yield "layout pipeline_model_parallel_size"
    if virtual is not None and (pipeline == 1 or shape.layers / pipeline % virtual):
        yield "layout virtual_pipeline_model_parallel_size"
    if rest:
        return  # without whole replicas nothing else can be said
    if layout.data_parallel_size not in {None, replicas}:
        yield "layout data_parallel_size"
    if (expert := layout.expert_model_parallel_size) > 1 and (
        not shape.experts or shape.experts % expert or ranks // pipeline % expert
    ):
        yield "layout expert_model_parallel_size"
    if (layout.sequence_parallel is True and tensor == 1) or (shape.experts and layout.sequence_parallel is False and tensor > 1):
        yield "layout sequence_parallel"
    pieces = (2 * context if context > 1 else 1) * (tensor if layout.sequence_parallel in {True, "auto"} else 1)
    if data.sequence_length > shape.context_tokens or data.sequence_length % pieces:
        yield "data sequence_length"
    yield from broken_batch_rules(request, replicas)


def broken_batch_rules(request, replicas):
    layout, whole = request.layout, request.data.global_batch_size
    micro, stated = layout.micro_batch_size or request.data.micro_batch_size, layout.gradient_accumulation_steps
    if whole % (replicas * micro):
        yield "data global_batch_size"
        return
    if stated is not None and stated * micro * replicas != whole:
        yield "layout gradient_accumulation_steps"
    steps = whole // (micro * replicas)
    if layout.virtual_pipeline_model_parallel_size is not None and steps and steps % layout.pipeline_model_parallel_size:
        yield "layout virtual_pipeline_model_parallel_size"


def refusal_of(request):
    try:
        resolve(request)
    except LayoutError as error:
        return error
    return None


@given(requests())
@settings(max_examples=200, deadline=None)
def test_a_layout_is_resolved_exactly_where_no_rule_is_broken(request):
    broken = set(broken_rules(request))
    refusal = refusal_of(request)
    assert (refusal is None) is (broken == set())
    if refusal is not None:
        assert refusal.where in broken
        assert refusal.what
        assert refusal.fix
        return
    layout, micro = resolve(request)
    ranks = layout.tensor * layout.pipeline * layout.context * layout.data
    assert ranks == layout.world_size == request.world_size
    assert micro is None or request.data.global_batch_size % (micro * layout.data) == 0
    assert layout.sequence_parallel in {layout.tensor > 1, request.layout.sequence_parallel}


@given(shapes())
@settings(max_examples=40, deadline=None)
def test_the_suggested_tensor_degrees_are_those_that_are_accepted(shape):
    def accepted(tensor):
        layout = LayoutConfig(tensor_model_parallel_size=tensor)
        places = {"where_layout": str, "where_data": str}
        data = DataConfig(global_batch_size=1, sequence_length=tensor)
        return refusal_of(LayoutRequest(shape=shape, layout=layout, data=data, world_size=tensor, **places)) is None

    assert valid_tensor_degrees(shape) == [tensor for tensor in range(1, shape.heads + 1) if accepted(tensor)]
