import threading

import pytest
from a_launch import Notes, a_launch, wait_for

from tprimat.hardware.gpus import Gpu, NvmlReader, amd_smi_samples, has_values
from tprimat.launch.run import run
from tprimat.records.store import RunDirectory

GPUS = tuple(Gpu(platform="cuda", name="NVIDIA H200", index=index, uuid=f"GPU-{index}") for index in (5, 3))
AMD_GPUS = tuple(Gpu(platform="rocm", name="AMD Instinct MI350X", index=index) for index in (0, 1))
AMD_SMI = """
{"gpu_data": [{"gpu": 0, "usage": {"gfx_activity": {"value": 97, "unit": "%"}},
"power": {"socket_power": {"value": 998, "unit": "W"}, "throttle_status": "N/A"},
"clock": {"gfx_0": {"clk": {"value": 1420, "unit": "MHz"}}},
"temperature": {"edge": "N/A", "hotspot": {"value": 88, "unit": "C"}},
"throttle": {"ppt_violation_status": "ACTIVE", "hbm_thermal_violation_status": "NOT ACTIVE", "prochot_violation_status": "N/A"}}]}
"""


def sampled(folder, *words, gpus=GPUS):
    notes = Notes()
    record, _ = run(a_launch(folder, *(words or ("steps", 1)), sampled_gpus=gpus), notes)
    return record, RunDirectory(folder).read_telemetry(), notes.notices


def until_sampled(folder, lines=1):
    """Words for a trainer that ends when so many samples have been written."""
    return ("await", folder / "telemetry.jsonl", lines, "steps", 1)


def test_the_gpus_of_a_run_are_read_while_it_goes_on(nvml, tmp_path, monkeypatch):
    monkeypatch.setattr("tprimat.hardware.gpus.PERIOD_SECONDS", 0.01)
    nvml(*[{"reasons": 0x4}] * 8)
    record, samples, notices = sampled(tmp_path, *until_sampled(tmp_path, 6))
    assert record.outcome == "completed"
    assert [sample.gpu for sample in samples[:6]] == [0, 1] * 3, "the run has two of the eight GPUs, in the order of its ranks"
    first = samples[0]
    assert (first.power_watts, first.clock_hertz, first.temperature_celsius, first.utilization) == (654.32, 1.755e9, 61.0, 0.99)
    assert first.throttle_reasons == ("power cap",)
    assert [sample.at_seconds for sample in samples] == sorted(sample.at_seconds for sample in samples)
    assert not notices


def test_a_gpu_that_does_not_tell_has_no_values(nvml):
    keys = ("power_milliwatts", "clock_megahertz", "temperature_celsius", "utilization_percent", "reasons")
    nvml(dict.fromkeys(keys), {"temperature_celsius": None})
    nothing, some = NvmlReader(["GPU-0", "GPU-1"]).read()
    assert not has_values(nothing)
    assert nothing.throttle_reasons == ()
    assert (some.power_watts, some.temperature_celsius) == (654.32, None)


@pytest.mark.parametrize(("gpus", "why"), [(GPUS, "NVML: NVML Shared Library Not Found"), (AMD_GPUS, "amd-smi does not answer")])
def test_a_missing_driver_or_tool_is_said_once_and_the_run_goes_on(nvml, tool, tmp_path, gpus, why):
    notes = Notes()
    notes.on_step = lambda step: wait_for(lambda: "telemetry" not in [thread.name for thread in threading.enumerate()])
    record, _ = run(a_launch(tmp_path / "run", "steps", 1, sampled_gpus=gpus), notes)
    assert (record.outcome, RunDirectory(tmp_path / "run").read_telemetry()) == ("completed", ())
    assert notes.notices == [f"No telemetry of the GPUs: {why}."]


def test_amd_smi_is_asked_again_and_again_without_what_it_does_not_know(tool, tmp_path, monkeypatch):
    monkeypatch.setattr("tprimat.hardware.gpus.AMD_PERIOD_SECONDS", 0.01)
    refusal = 'case "$*" in *--throttle*) echo unrecognized arguments >&2; exit 2;; esac'
    tool("amd-smi", f"{refusal}\ncat <<'END'\n{AMD_SMI}\nEND")
    _, samples, notices = sampled(tmp_path / "run", *until_sampled(tmp_path / "run", 2), gpus=AMD_GPUS)
    assert len(samples) > 1
    first = samples[0]
    assert (first.gpu, first.power_watts, first.clock_hertz) == (0, 998.0, 1.42e9)
    assert (first.temperature_celsius, first.utilization, first.throttle_reasons) == (88.0, 0.97, ("power cap",))
    assert not notices


@pytest.mark.parametrize("text", ["", "no such device", "[1, 2", '{"card0": 3}', '[{"gpu": 0}]', "null"])
def test_babble_of_amds_tools_says_nothing(text):
    assert not any(has_values(sample) for sample in amd_smi_samples(text))
