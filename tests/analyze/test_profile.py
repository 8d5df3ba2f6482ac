"""Summaries of a CUDA-like trace that is made by hand, so that every figure can be worked out on paper.

What the profiler itself writes is summarized in tests/train/test_profiler.py.
"""

import gzip
import json
from pathlib import Path

import pytest

from tprimat.analyze.trace import WANTED, kernel_class, summarize
from tprimat.core.errors import MetricError, RecordError
from tprimat.records.store import read_trace

COMPUTE, NETWORK = 7, 13
GEMM = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT"
FLASH = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128"
NORM = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>"
REDUCE = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_a_kernel_is_known_by_its_library_s_name():
    named = [line.split("\t") for line in (Path(__file__).parent / "kernels.tsv").read_text(encoding="utf8").splitlines()]
    assert len(named) > 50
    assert [name for kind, name in named if kernel_class(name) != kind] == []


def event(category, name, start, end, stream=COMPUTE):
    """Milliseconds in, the format's microseconds out."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": 1e6 + start * 1e3,
        "dur": (end - start) * 1e3,
        "pid": 0,
        "tid": stream,
    }


def cuda_like():
    """Two steps of 100 ms and 80 ms by the device's ranges.

    Step 2:  0-40 matmul, 40-60 attention, 60-70 elementwise, a collective 50-90 beside them (20 behind, 20 exposed), 90-95 a
    copy of which nothing is hidden, 95-100 idle.
    Step 3: 100-150 matmul, 150-160 idle, 160-170 an elementwise kernel and 170-180 Adam's, both inside the optimizer's range;
    a copy 100-120 behind the matmul.
    """
    return [
        event("cpu_op", "aten::mm", -5, -4, "host"),
        event("user_annotation", "ProfilerStep#2", -5, 20, "host"),
        event("user_annotation", "ProfilerStep#3", 20, 40, "host"),
        event("kernel", GEMM, -5, -1),  # of the step before, still running when the trace began
        event("gpu_user_annotation", "ProfilerStep#2", 0, 95),
        event("gpu_user_annotation", "ProfilerStep#2", 50, 90, NETWORK),
        event("kernel", GEMM, 0, 25),
        event("kernel", GEMM, 25, 40),
        event("kernel", FLASH, 40, 60),
        event("kernel", NORM, 60, 70),
        event("kernel", REDUCE, 50, 90, NETWORK),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 90, 95),
        event("gpu_user_annotation", "ProfilerStep#3", 100, 180),
        event("kernel", GEMM, 100, 150),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 100, 120, 9),
        event("gpu_user_annotation", "Optimizer.step#AdamW.step", 160, 180),
        event("kernel", NORM, 160, 170),
        event("kernel", "void multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", 170, 180),
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 1e6},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python3"}},
    ]


def milliseconds(value):
    return pytest.approx(value / 1e3, abs=1e-9)


def test_exposed_communication_and_idle_time_are_what_one_reads_from_the_timeline():
    summary = summarize({"traceEvents": cuda_like(), "tprimat": {"model": "llama", "step_of_profiler_step_0": 1}})
    assert summary.steps == ({"number": 3, "seconds": milliseconds(100)}, {"number": 4, "seconds": milliseconds(80)})
    assert summary.step_seconds == milliseconds(90)
    assert {part.kind: part.seconds for part in summary.classes if part.kind not in {"expert_matmul", "router", "permute"}} == {
        "matmul": milliseconds((40 + 50) / 2),
        "attention": milliseconds(20 / 2),
        "norm_elementwise": milliseconds(10 / 2),
        "optimizer": milliseconds(20 / 2),
        "other": 0,
        "communication": milliseconds(20 / 2),
        "memory_copy": milliseconds(5 / 2),
    }
    assert summary.exposed_communication_seconds == milliseconds(10)
    assert summary.idle_seconds == milliseconds(7.5)
    busy = {part.kind: part.busy_seconds for part in summary.classes}
    assert (busy["memory_copy"], busy["communication"]) == (milliseconds((5 + 20) / 2), milliseconds(20))


def test_exposed_communication_is_divided_by_the_ranks_that_it_joins_and_idle_time_by_the_loader():
    groups = ("TENSOR_MODEL_PARALLEL_GROUP", "EXPERT_DATA_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP", "")
    exchanges = [
        {**event("kernel", name, 10 * at, 10 * at + 10, NETWORK), "args": {"Process Group Description": group}}
        for at, (name, group) in enumerate(zip((REDUCE, REDUCE, "ncclDevKernel_SendRecv", REDUCE), groups, strict=True))
    ]
    symmetric = event("kernel", "c10d::symmetric_memory::barrier_kernel", 40, 45, NETWORK)
    loading = event("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 43, 50, "host")
    summary = summarize(
        {
            "traceEvents": [
                event("kernel", GEMM, 0, 5),
                *exchanges,
                symmetric,
                loading,
                *launched(event("kernel", GEMM, 60, 61), 46, 1),
            ]
        }
    )
    assert {name: seconds for name, seconds in summary.exchanges.items() if seconds} == {
        "tensor": milliseconds(10 - 5 + 5),
        "replicas": milliseconds(10),
        "pipeline": milliseconds(10),
    }
    assert summary.exposed_communication_seconds == milliseconds(40)
    assert (summary.idle_seconds, summary.data_seconds, summary.between_seconds) == (milliseconds(15), milliseconds(5), 0)


def test_a_trace_without_steps_counts_as_one():
    events = [event("kernel", GEMM, 0, 30), event("kernel", REDUCE, 20, 50, NETWORK)]
    summary = summarize({"traceEvents": events})
    assert (len(summary.steps), summary.step_seconds, summary.idle_seconds) == (1, milliseconds(50), 0)
    assert summary.exposed_communication_seconds == milliseconds(20)


def test_a_copy_from_another_gpus_memory_is_communication():
    copies = [event("gpu_memcpy", f"Memcpy {way} (Device -> Device)", 30, 60, NETWORK) for way in ("PtoP", "DtoD")]
    seconds = [
        {part.kind: part.seconds for part in summarize({"traceEvents": [event("kernel", GEMM, 0, 40), copy]}).classes}
        for copy in copies
    ]
    assert (seconds[0]["communication"], seconds[0]["memory_copy"]) == (milliseconds(20), 0)
    assert (seconds[1]["communication"], seconds[1]["memory_copy"]) == (0, milliseconds(20))


def test_a_kernel_that_runs_into_the_next_step_is_one_call():
    events = [
        event("gpu_user_annotation", "ProfilerStep#1", 0, 40),
        event("gpu_user_annotation", "ProfilerStep#2", 40, 80),
        event("kernel", GEMM, 0, 80),
        event("kernel", REDUCE, 30, 50, NETWORK),
    ]
    summary = summarize({"traceEvents": events})
    assert {row.name: row.seconds for row in summary.top} == {GEMM: milliseconds(40), REDUCE: milliseconds(10)}


def test_a_negative_duration_counts_as_none():
    events = [event("kernel", GEMM, 0, 10), event("kernel", NORM, 8, 2), event("kernel", GEMM, 20, 30)]
    summary = summarize({"traceEvents": events})
    assert (summary.step_seconds, summary.idle_seconds) == (milliseconds(30), milliseconds(10))
    assert {part.kind: part.seconds for part in summary.classes if part.seconds} == {"matmul": milliseconds(20)}


def test_a_small_kernel_belongs_to_the_range_that_holds_it_not_to_one_that_ended():
    events = [
        event("gpu_user_annotation", "optimizer_step", 50, 90),
        event("gpu_user_annotation", "Optimizer.step#AdamW.step", 60, 70),
        event("kernel", NORM, 30, 40),
        event("kernel", NORM, 80, 90),
        event("kernel", NORM, 80, 90, NETWORK),
    ]
    busy = {part.kind: part.busy_seconds for part in summarize({"traceEvents": events}).classes if part.busy_seconds}
    assert busy == {"norm_elementwise": milliseconds(10 + 10), "optimizer": milliseconds(10)}


def launched(work, at, call):
    """Work of the device, and the call of the host that launches it."""
    launch = event("cuda_runtime", "cudaLaunchKernel", at, at + 0.1, "host")
    return [{**entry, "args": {"correlation": call}} for entry in (launch, work)]


def test_without_ranges_of_the_device_the_launches_tell_whose_work_a_kernel_is():
    """The host is 20 ms ahead at the end of step 1 and still ahead when it leaves step 2."""
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 20, "host"),
        event("user_annotation", "ProfilerStep#2", 20, 40, "host"),
        *launched(event("kernel", GEMM, 2, 35), 1, 101),
        *launched(event("kernel", REDUCE, 30, 50, NETWORK), 15, 102),
        *launched(event("kernel", FLASH, 40, 60), 21, 103),
        *launched(event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 70, 80), 39, 104),
        event("kernel", NORM, 90, 95),  # launched after the steps
    ]
    summary = summarize({"traceEvents": events})
    assert summary.steps == ({"number": 1, "seconds": milliseconds(38)}, {"number": 2, "seconds": milliseconds(40)})
    assert summary.idle_seconds == summary.between_seconds == milliseconds(10 / 2), "the copy was launched in time"
    assert summary.exposed_communication_seconds == milliseconds(5 / 2)


def test_a_host_that_launches_the_next_kernel_while_the_last_one_starts_is_late_all_the_same():
    calls = [launched(event("kernel", NORM, at + 6, at + 8), at, 1 + at) for at in range(0, 50, 5)]
    summary = summarize({"traceEvents": [entry for call in calls for entry in call]})
    assert (summary.idle_seconds, summary.between_seconds) == (milliseconds(27), 0)


def test_without_ranges_of_the_device_the_optimizer_s_small_kernels_are_those_launched_in_its_range():
    events = [
        event("user_annotation", "Optimizer.step#SGD.step", 10, 20, "host"),
        *launched(event("kernel", NORM, 10, 18), 5, 1),  # runs, but was not launched, while the host steps
        *launched(event("kernel", NORM, 18, 22), 11, 2),
        *launched(event("kernel", GEMM, 22, 30), 12, 3),
    ]
    summary = summarize({"traceEvents": events})
    assert {part.kind: part.seconds for part in summary.classes if part.seconds} == {
        "norm_elementwise": milliseconds(8),
        "optimizer": milliseconds(4),
        "matmul": milliseconds(8),
    }


def test_a_range_of_the_device_that_misses_kernels_of_the_last_step_gives_way_to_the_launches():
    """As in a trace of MI300X, whose last range lasted 17 us and whose step took 19 ms."""
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 5, "host"),
        event("user_annotation", "ProfilerStep#2", 5, 9, "host"),
        event("gpu_user_annotation", "ProfilerStep#1", 4, 20),
        event("gpu_user_annotation", "ProfilerStep#2", 20, 21),
        *launched(event("kernel", GEMM, 4, 20), 1, 1),
        *launched(event("kernel", GEMM, 20, 36), 6, 2),
    ]
    summary = summarize({"traceEvents": events})
    assert [step["seconds"] for step in summary.steps] == [milliseconds(16), milliseconds(16)]


@pytest.mark.parametrize(
    ("events", "what"),
    [
        ([], "no kernel"),
        ([{"ph": "M", "name": "process_name"}, "text"], "no kernel"),
        ([{"ph": "X", "cat": "kernel", "name": GEMM, "ts": 5}], "no start or duration"),
        ([{"ph": "X", "cat": "kernel", "name": GEMM, "ts": "soon", "dur": 1}], "no start or duration"),
        ([{"ph": "X", "cat": "kernel", "name": GEMM, "ts": 5, "dur": float("nan")}], "no start or duration"),
        ([event("gpu_user_annotation", "ProfilerStep#1", 0, 9), event("kernel", GEMM, 20, 30)], "inside a profiled step"),
        ([event("user_annotation", "ProfilerStep#1", 0, 9)], "no kernel"),
    ],
)
def test_a_trace_without_work_has_no_summary(events, what):
    with pytest.raises(MetricError, match=what):
        summarize({"traceEvents": events})


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "cannot be read"),
        (b'{"traceEvents": [{"ph"', "is not JSON"),
        (b"{}", "is not a trace"),
        (b"[1, 2", "is not JSON"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "damaged gzip"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-8] + bytes(8), "damaged gzip"),
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path, content, what):
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecordError, match=what):
        read_trace(path)


def test_a_gzip_file_that_unpacks_to_too_much_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("tprimat.records.store.LARGEST_UNPACKED", 1000)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" " * 1001))
    with pytest.raises(RecordError, match="more than 1,000 bytes"):
        read_trace(path)
    path.write_bytes(gzip.compress(b'{"traceEvents": []}'.ljust(500)) + gzip.compress(b" " * 500))
    assert read_trace(path) == {"traceEvents": []}


def test_a_trace_is_read_plain_gzipped_and_with_the_bytes_that_kineto_lets_through(tmp_path):
    document = {"traceEvents": cuda_like()}
    plain, packed, rough = (tmp_path / name for name in ("a.json", "b.json.gz", "c.json"))
    plain.write_text(json.dumps(document))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    rough.write_bytes(plain.read_bytes().replace(b"python3", b"py\xff\x01"))
    assert read_trace(plain) == read_trace(packed) == document
    assert len(read_trace(rough)["traceEvents"]) == len(cuda_like())


def test_of_a_trace_in_kineto_s_layout_only_the_events_that_a_summary_uses_are_parsed(tmp_path):
    unused = [event("python_function", "forward", 0, 9, "host"), event("cpu_op", "aten::mm", 0, 9, "host")]
    document = {"tprimat": {"step_of_profiler_step_0": 1}, "traceEvents": cuda_like() + unused}
    lines = ",".join("\n  " + json.dumps(one, indent=2).replace("\n", "\n  ") for one in document["traceEvents"])
    path = tmp_path / "trace.json"
    text = f'{{ "tprimat": {json.dumps(document["tprimat"])},\n  "traceEvents": [\n{lines}\n  ],"traceName": "x" }}'
    path.write_bytes(text.encode().replace(b"python3", b"py\xff\x01"))
    read = read_trace(path, WANTED)
    assert not {"python_function", "cpu_op"} & {one["cat"] for one in read["traceEvents"]}
    assert (read["traceName"], len(read_trace(path)["traceEvents"])) == ("x", len(document["traceEvents"]))
    assert summarize(read) == summarize(document)
    path.write_text(text[:-20])
    with pytest.raises(RecordError, match="is not JSON"):
        read_trace(path, WANTED)
