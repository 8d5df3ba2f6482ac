import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from a_launch import ROOT, Notes, a_launch, wait_for

from tprimat.hardware.gpus import Gpu
from tprimat.hardware.sampler import amd_smi_readings, nvidia_reasons, nvidia_row, rocm_smi_readings
from tprimat.launch.run import run
from tprimat.records.store import RunDirectory

GPUS = tuple(Gpu(platform="cuda", name="NVIDIA H200", index=index, uuid=f"GPU-{index}") for index in (5, 3))
ROW = "GPU-{}, 654.32, 1755, 61, 99, {}"
PATIENT = ("sleep", "0.6", "steps", "1")
AMD_SMI = """
{"gpu_data": [{"gpu": 0, "usage": {"gfx_activity": {"value": 97, "unit": "%"}},
"power": {"socket_power": {"value": 998, "unit": "W"}, "throttle_status": "N/A"},
"clock": {"gfx_0": {"clk": {"value": 1420, "unit": "MHz"}}},
"temperature": {"edge": "N/A", "hotspot": {"value": 88, "unit": "C"}},
"throttle": {"ppt_violation_status": "ACTIVE", "hbm_thermal_violation_status": "NOT ACTIVE", "prochot_violation_status": "N/A"}}]}
"""
ROCM_SMI = """
WARNING: AMD GPU device(s) is/are in a low-power state.
{"card1": {"Current Socket Graphics Package Power (W)": "742.0", "Temperature (Sensor junction) (C)": "77.0",
"sclk clock speed:": "(2100Mhz)", "GPU use (%)": "100"}, "system": {"Driver version": "6.10.5"}}
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Puts a shell program into PATH, before all others, and hides pynvml."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)

    def make(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{textwrap.dedent(script)}\n")
        (folder / name).chmod(0o755)

    return make


def sampled(folder, *words, gpus=GPUS):
    notes = Notes()
    record, _ = run(a_launch(folder, *words, sampled_gpus=gpus), notes)
    return record, RunDirectory(folder).read_telemetry(), notes.notices


def test_the_gpus_of_a_run_are_read_while_it_goes_on(tool, tmp_path, left_behind):
    rows = "\n".join(f"echo '{ROW.format(index, '0x0000000000000004')}'" for index in range(8))
    tool("nvidia-smi", f'echo "$@" >> {tmp_path}/asked\nwhile true; do {rows}\n sleep 0.05; done')
    record, samples, notices = sampled(tmp_path / "run", "sleep", "0.6", "steps", "1")
    assert record.outcome == "completed"
    assert {sample.gpu for sample in samples} == {0, 1}, "the run has two of the eight GPUs"
    first = samples[0]
    assert (first.power_watts, first.clock_hertz, first.temperature_celsius, first.utilization) == (654.32, 1.755e9, 61.0, 0.99)
    assert first.throttle_reasons == ("power cap",)
    assert [sample.at_seconds for sample in samples] == sorted(sample.at_seconds for sample in samples)
    assert not notices
    assert not left_behind()
    assert "--loop-ms=1000" in (tmp_path / "asked").read_text()


def test_readings_count_from_the_start_of_the_record(tool, tmp_path):
    tool("nvidia-smi", f"while true; do echo '{ROW.format(5, '0x0')}'; sleep 0.05; done")
    _, samples, _ = sampled(tmp_path / "run", *PATIENT)
    began = 1767225600.0  # 2026-01-01, as a_launch's record says
    assert time.time() - began == pytest.approx(samples[-1].at_seconds, abs=30)


def test_a_tool_that_holds_its_lines_back_from_pipes_is_read_in_time(tool, tmp_path):
    script = f"import time; [(print('{ROW.format(5, '0x0')}'), time.sleep(0.05)) for _ in range(1000)]"
    tool("nvidia-smi", f'exec {sys.executable} -S -c "{script}"')
    assert sampled(tmp_path / "run", *PATIENT)[1]


def test_an_older_driver_is_asked_by_the_older_name(tool, tmp_path):
    refusal = 'case "$1" in *event_reasons*) echo Field is not a valid field to query.; exit 2;; esac'
    tool("nvidia-smi", f"{refusal}\nwhile true; do echo '{ROW.format(5, '0x0000000000000060')}'; sleep 0.05; done")
    _, samples, notices = sampled(tmp_path / "run", *PATIENT)
    assert samples[0].throttle_reasons == ("thermal (driver)", "thermal (hardware)")
    assert not notices


def test_a_tool_that_fails_is_said_once_and_the_run_goes_on(tool, tmp_path):
    tool("nvidia-smi", "echo Failed to initialize NVML: Driver/library version mismatch; exit 18")
    record, samples, notices = sampled(tmp_path / "run", *PATIENT)
    assert (record.outcome, samples) == ("completed", ())
    assert notices == [
        "no telemetry of the GPUs: nvidia-smi ended, saying: Failed to initialize NVML: Driver/library version mismatch"
    ]


def test_a_missing_tool_is_said_once_and_the_run_goes_on(tool, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    record, _, notices = sampled(tmp_path / "run", *PATIENT)
    assert record.outcome == "completed"
    assert notices == ["no telemetry of the GPUs: nvidia-smi: not installed."]


def test_a_full_disk_under_the_readings_is_said_once_and_the_run_goes_on(tool, tmp_path):
    tool("nvidia-smi", f"while true; do echo '{ROW.format(5, '0x0')}'; sleep 0.05; done")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "telemetry.jsonl").symlink_to("/dev/full")
    notes = Notes()
    record, _ = run(a_launch(tmp_path / "run", *PATIENT, sampled_gpus=GPUS), notes)
    assert record.outcome == "completed"
    assert len(notes.notices) == 1
    assert "No space left on device" in notes.notices[0]


def test_a_tool_that_says_nothing_delays_nothing_and_is_ended(tool, tmp_path, left_behind):
    tool("nvidia-smi", "trap '' TERM HUP; exec sleep 600")
    began = time.monotonic()
    record, samples, _ = sampled(tmp_path / "run", "steps", "1")
    assert (record.outcome, samples) == ("completed", ())
    assert time.monotonic() - began < 5
    assert not left_behind()


def test_without_gpus_nothing_is_asked(tool, tmp_path):
    tool("nvidia-smi", f"touch {tmp_path}/asked")
    _, _, notices = sampled(tmp_path / "run", *PATIENT, gpus=())
    assert not (tmp_path / "asked").exists()
    assert not (tmp_path / "run" / "telemetry.jsonl").exists()
    assert not notices


SAMPLED_LAUNCHER = """
import dataclasses, sys
sys.path[:0] = [{root!r}, {tests!r}]
sys.modules["pynvml"] = None
from a_launch import Notes, a_launch
from tprimat.hardware.gpus import Gpu
from tprimat.launch.run import run
gpu = Gpu(platform="cuda", name=None, index=0, uuid="GPU-5")
run(a_launch(sys.argv[1], "steps", 1, "sleep", 100, sampled_gpus=(gpu,)), Notes())
"""


def test_a_launcher_that_is_killed_leaves_no_tool_behind(tool, tmp_path, left_behind, cookie):
    tool("nvidia-smi", f"while true; do echo '{ROW.format(5, '0x0')}'; sleep 0.05; done")
    script = SAMPLED_LAUNCHER.format(root=str(ROOT), tests=str(ROOT / "tests" / "launch"))
    launcher = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "run")])
    wait_for((tmp_path / "run" / "telemetry.jsonl").exists)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_for(lambda: not left_behind())


NVML = """
class NVMLError(Exception):
    pass
NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
class Rates:
    gpu = 98
def nvmlInit():
    pass
def nvmlDeviceGetHandleByUUID(uuid):
    return uuid
def nvmlDeviceGetPowerUsage(handle):
    return 698_500
def nvmlDeviceGetClockInfo(handle, kind):
    return {NVML_CLOCK_SM: 1980}[kind]
def nvmlDeviceGetTemperature(handle, sensor):
    raise NVMLError("Not Supported")
def nvmlDeviceGetUtilizationRates(handle):
    return Rates
def nvmlDeviceGetCurrentClocksThrottleReasons(handle):
    return 0x1 | 0x2 | 0x80
"""


def test_nvidias_python_package_is_asked_where_it_is_installed(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    _, samples, notices = sampled(tmp_path / "run", *PATIENT)
    monkeypatch.delitem(sys.modules, "pynvml")
    assert [sample.gpu for sample in samples][:2] == [0, 1]
    first = samples[0]
    assert (first.power_watts, first.clock_hertz, first.temperature_celsius, first.utilization) == (698.5, 1.98e9, None, 0.98)
    assert first.throttle_reasons == ("power brake",)
    assert not notices


def test_amd_smi_is_asked_again_and_again_without_what_it_does_not_know(tool, tmp_path, monkeypatch):
    monkeypatch.setattr("tprimat.hardware.sampler.POLL_SECONDS", 0.05)
    refusal = 'case "$*" in *--throttle*) echo unrecognized arguments >&2; exit 2;; esac'
    tool("amd-smi", f"{refusal}\ncat <<'END'\n{AMD_SMI}\nEND")
    gpu = Gpu(platform="rocm", name="AMD Instinct MI350X", index=0)
    _, samples, notices = sampled(tmp_path / "run", *PATIENT, gpus=(gpu,))
    assert len(samples) > 1
    assert samples[0].power_watts == 998.0
    assert not notices


def test_rocm_smi_is_asked_where_there_is_no_amd_smi(tool, tmp_path, monkeypatch):
    monkeypatch.setattr("tprimat.hardware.sampler.POLL_SECONDS", 0.05)
    tool("rocm-smi", f"cat <<'END'\n{ROCM_SMI}\nEND")
    gpu = Gpu(platform="rocm", name="AMD Instinct MI300X", index=1)
    _, samples, notices = sampled(tmp_path / "run", *PATIENT, gpus=(gpu,))
    assert (samples[0].gpu, samples[0].power_watts) == (0, 742.0)
    assert not notices


def test_what_amds_tools_say_is_understood():
    (new,) = amd_smi_readings(AMD_SMI)
    assert (new.device, new.clock_hertz, new.temperature_celsius, new.utilization) == ("0", 1.42e9, 88.0, 0.97)
    assert new.throttle_reasons == ("power cap",)
    (old,) = rocm_smi_readings(ROCM_SMI)
    assert (old.device, old.clock_hertz, old.temperature_celsius, old.utilization) == ("1", 2.1e9, 77.0, 1.0)


@pytest.mark.parametrize("text", ["", "no such device", "[1, 2", '{"card0": 3}', '[{"gpu": 0}]', "null"])
def test_babble_of_amds_tools_says_nothing(text):
    readings = [*amd_smi_readings(text), *rocm_smi_readings(text)]
    assert not any(reading.says_something for reading in readings)


@pytest.mark.parametrize("line", ["", "No devices were found", "GPU-1, 3", '"', "a, b, c, d, e, f"])
def test_a_line_that_is_no_reading_is_none(line):
    assert nvidia_row(line) is None


def test_a_gpu_that_does_not_tell_has_no_values():
    row = nvidia_row("GPU-1, [N/A], [N/A], [Unknown Error], [N/A], [N/A]")
    assert not row.says_something
    assert row.throttle_reasons == ()


def test_idle_and_asked_for_clocks_are_no_throttling():
    assert nvidia_reasons(0x1 | 0x2 | 0x100) == ()
    assert nvidia_reasons(0x4 | 0x8 | 0x40) == ("power cap", "hw slowdown", "thermal (hardware)")
