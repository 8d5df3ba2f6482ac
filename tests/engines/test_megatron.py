"""What the embedded engine refuses before a run starts: plans that contradict themselves, and what its parts cannot do."""

from pathlib import Path

import pytest
from commands import run_command
from plans import request_of, short_settings

from tprimat.analyze.metrics import run_metrics
from tprimat.config.load import read_config
from tprimat.engines import ENGINE_NAMES
from tprimat.engines.base import engine_named
from tprimat.engines.megatron import ENGINE
from tprimat.plan.build import build_plan
from tprimat.plan.graphs import launches_graphs
from tprimat.records.discover import load_results
from tprimat.report.summary import summary
from tprimat.runner.run import announcement

RECORDS = Path(__file__).resolve().parents[2] / "benchmarks" / "records" / "h200"


def plan_of(*changes, model="llama", platform="nvidia"):
    settings = short_settings(changes, model, "minimal_communication", platform)
    request = request_of(model, "minimal_communication", platform=platform)
    return build_plan(read_config(settings=settings, environment={}), request)


def refusal(*changes, engine=ENGINE, **which):
    return engine.refusal(plan_of(*changes, **which), lambda *keys: ".".join(keys))


TENSOR, PIPELINE, FP8 = "l.tensor_model_parallel_size=2", "l.pipeline_model_parallel_size=2", "p.precision=fp8"
THEIRS = "o.layers=transformer_engine"


@pytest.mark.parametrize(
    ("switch", "changes", "what", "fix"),
    [
        ("fully_shard", [TENSOR], "the layout has tensor parallelism", "a --parallel with TP1"),
        ("fully_shard", [PIPELINE], "the layout has pipeline parallelism", "a --parallel with PP1"),
        ("fully_shard", [FP8], "the precision is fp8", "--precision bf16"),
        ("fully_shard", [THEIRS], "layers is transformer_engine", "layers: local"),
        ("fully_shard", ["o.gradients=bf16"], "gradients is bf16", "gradients: fp32"),
        ("fully_shard", ["o.distributed_optimizer=false"], "distributed_optimizer is off", "distributed_optimizer: true"),
        (
            "fully_shard",
            ["o.accumulate_weight_gradients=true"],
            "accumulate_weight_gradients is on",
            "accumulate_weight_gradients: auto",
        ),
        (
            "cuda_graphs",
            [PIPELINE, THEIRS],
            "Transformer Engine's layers run in pipeline stages",
            "layers: local, or a --parallel with PP1",
        ),
        ("cuda_graphs", ["l.context_parallel_size=2"], "the layout has context parallelism", "a --parallel with CP1"),
        ("cuda_graphs", ["p.recompute=full"], "recompute is full", "recompute: none"),
        ("cuda_graphs", ["o.fully_shard=true"], "fully_shard is on", "fully_shard: false"),
        ("cuda_graphs", ["training.duration.max_steps=4"], "there are 4 steps", "--steps 5"),
        ("cuda_graphs", [THEIRS, FP8], "Transformer Engine multiplies in fp8", "layers: local, or --precision bf16"),
    ],
)
def test_what_contradicts_a_switch_is_refused_with_the_way_out(switch, changes, what, fix):
    error = refusal(f"o.{switch}=true", *changes)
    assert error.what == f"{switch} is on, but {what}."
    assert error.where == f"platform_optimizations.nvidia.engine_options.{switch}"
    assert error.why
    assert error.fix.startswith(fix)
    assert error.fix.endswith(f", or {switch}: false")


@pytest.mark.parametrize(
    ("changes", "which", "what"),
    [
        (["o.cuda_graphs=true"], {"model": "mixtral"}, "cuda_graphs is on, but mixtral-8x7b has experts."),
        (["o.cuda_graphs=true"], {"platform": "amd"}, "cuda_graphs is on, but the platform is amd."),
        (["o.fully_shard=true"], {"model": "mixtral"}, "fully_shard is on, but mixtral-8x7b has experts."),
        ([THEIRS], {"platform": "amd"}, "layers is transformer_engine."),
        (["p.precision=fp32", "o.gradients=bf16"], {}, "gradients is bf16."),
        (["o.optimizer_states=bf16"], {}, "optimizer_states is bf16."),
        ([FP8], {"model": "mixtral"}, "The embedded engine's own layers train mixtral-8x7b, which has experts, in bf16 only."),
        (
            [FP8, "p.recompute=selective", "p.recompute_modules=[layernorm, mlp]"],
            {},
            "The embedded engine's own layers cannot recompute layernorm in fp8.",
        ),
        ([FP8, "training.data.sequence_length=1000"], {}, "A micro-batch of 1000 cannot be multiplied in fp8."),
        (
            [FP8, THEIRS, TENSOR, "l.expert_model_parallel_size=1"],
            {"model": "mixtral"},
            "Transformer Engine's experts under tensor parallelism need expert parallelism.",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_refused(changes, which, what):
    error = refusal(*changes, **which)
    assert error.what == what
    assert error.where
    assert error.fix


@pytest.mark.parametrize(
    "changes",
    [
        ["o.cuda_graphs=true", TENSOR, PIPELINE, FP8, "hardware.platforms.nvidia.nodes=2"],
        ["o.fully_shard=true", "p.recompute=full", "l.context_parallel_size=2"],
        [FP8, "p.recompute=selective", "p.recompute_modules=[mlp]"],
    ],
)
def test_what_goes_together_is_not_refused(changes):
    assert refusal(*changes) is None


SHORT = "l.micro_batch_size=1"


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        (["l.tensor_model_parallel_size=4", "l.micro_batch_size=4"], "1.050 x (tp4-bf16"),
        ([TENSOR, SHORT], "1.017 x (tp2-bf16"),
        ([FP8, SHORT], "1.056 x (tp1-fp8"),
        ([TENSOR, "l.micro_batch_size=4"], "1.008 x (tp2-bf16-8192"),
        ([TENSOR, FP8, SHORT], "1.016 x (tp2-fp8"),
        ([TENSOR, "l.micro_batch_size=8"], None),
        ([SHORT], None),
        ([TENSOR, PIPELINE], None),
        ([TENSOR, "p.recompute=full"], None),
        ([TENSOR, THEIRS], None),
        ([TENSOR, "training.duration.max_steps=4"], None),
        (["l.tensor_model_parallel_size=4", FP8, "profiling.enabled=true"], "1.370 x (tp4-fp8"),
        ([TENSOR, "hardware.platforms.nvidia.nodes=2"], None),
        ([TENSOR, SHORT, "o.cuda_graphs=false"], None),
        (["o.cuda_graphs=true"], "no record shows a gain here"),
        (["l.tensor_model_parallel_size=8", SHORT], "1.050 x (tp4-bf16"),
    ],
)
def test_graphs_run_where_a_record_shows_a_gain_or_where_asked(changes, row):
    plan = plan_of(*changes)
    assert ENGINE.options(plan)["cuda_graphs"] is launches_graphs(plan) is (row is not None)
    remark = ENGINE.remark(plan)
    assert remark is None if row is None else (row in remark and "recording makes step 3 about" in remark)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
@pytest.mark.parametrize("precision", ["fp8-blockwise", "mxfp8", "nvfp4"])
def test_scales_of_blocks_are_refused_by_name_where_no_layers_have_them(engine, precision):
    error = refusal(f"p.precision={precision}", engine=engine_named(engine))
    if engine in {"bridge", "megatron-lm"}:
        assert error is None
    else:
        assert error.what == f"The engine {engine} does not train in {precision}."
        assert error.fix.endswith("or --engine bridge")


def test_a_gpu_without_scales_of_blocks_is_refused_by_name():
    words = ("--dry-run", "--model", "llama", "--engine", "bridge", "--precision", "mxfp8")
    hopper, blackwell = (run_command("benchmark.py", *words, "--gpu", name) for name in ("h100", "b200"))
    assert hopper.stderr.startswith("error: H100 SXM does not multiply in mxfp8.")
    assert "micro-batch 1, mxfp8" in blackwell.stdout


def test_other_engines_refuse_its_switches():
    error = refusal("o.fully_shard=true", engine=engine_named("nemo"))
    assert (error.what, error.why) == ("fully_shard is on.", "The engine nemo has no such switch.")


def test_plan_and_summary_say_that_weights_are_split():
    assert ", fully sharded, GradAccum" in announcement(plan_of("o.fully_shard=true"))
    assert "sharded" not in announcement(plan_of())
    ((split, whole), _) = load_results([RECORDS / "fully-sharded" / "mbs4_full", RECORDS / "two-gpus" / "engine" / "dp_mbs4"])
    texts = [summary([(one.run, run_metrics(one.run, one.steps), Path("log"))]) for one in (split, whole)]
    assert ["weights split over 2" in text for text in texts] == [True, False]
