"""NVIDIA's management library as tests need it: $FAKE_GPUS lists the GPUs as JSON; without it there is no driver.

A GPU is an object with the keys of GPU below; null for a value that the GPU does not support. {"hidden": true} may not be opened.
$FAKE_DRIVER replaces the driver's version; before 535 the clocks' event reasons have their older name only.
"""

import json
import os

NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
GPU = {
    "name": "NVIDIA H200",
    "memory_bytes": 143771 << 20,
    "power_limit_milliwatts": 700_000,
    "power_milliwatts": 654_320,
    "clock_megahertz": 1755,
    "temperature_celsius": 61,
    "utilization_percent": 99,
    "links": 18,
    "processes": [],
    "reasons": 0,
}


class NVMLError(Exception):
    pass


class Numbers:
    def __init__(self, **values):
        self.__dict__.update(values)


def supported(value):
    if value is None:
        raise NVMLError("Not Supported")
    return value


def nvmlInit():  # noqa: N802
    if "FAKE_GPUS" not in os.environ:
        raise NVMLError("NVML Shared Library Not Found")


def gpus():
    return [{**GPU, "uuid": f"GPU-{index}", **gpu} for index, gpu in enumerate(json.loads(os.environ["FAKE_GPUS"]))]


def nvmlSystemGetDriverVersion():  # noqa: N802
    return os.environ.get("FAKE_DRIVER", "570.86.15")


def nvmlDeviceGetCount():  # noqa: N802
    return len(gpus())


def nvmlDeviceGetHandleByIndex(index):  # noqa: N802
    if gpus()[index].get("hidden"):
        raise NVMLError("Insufficient Permissions")
    return gpus()[index]["uuid"]


def nvmlDeviceGetHandleByUUID(uuid):  # noqa: N802
    value(uuid, "name")
    return uuid


def value(device, key):
    held = [gpu for gpu in gpus() if gpu["uuid"] == device]
    if not held:
        raise NVMLError("Not Found")
    return held[0][key]


def nvmlDeviceGetUUID(device):  # noqa: N802
    return device


def nvmlDeviceGetName(device):  # noqa: N802
    return value(device, "name")


def nvmlDeviceGetMemoryInfo(device):  # noqa: N802
    return Numbers(total=supported(value(device, "memory_bytes")))


def reader(key, *kinds):
    def read(device, *asked):
        assert asked == kinds
        return supported(value(device, key))

    return read


nvmlDeviceGetPowerManagementLimit = reader("power_limit_milliwatts")  # noqa: N816
nvmlDeviceGetPowerUsage = reader("power_milliwatts")  # noqa: N816
nvmlDeviceGetClockInfo = reader("clock_megahertz", NVML_CLOCK_SM)  # noqa: N816
nvmlDeviceGetTemperature = reader("temperature_celsius", NVML_TEMPERATURE_GPU)  # noqa: N816
nvmlDeviceGetCurrentClocksThrottleReasons = reader("reasons")  # noqa: N816


def nvmlDeviceGetUtilizationRates(device):  # noqa: N802
    return Numbers(gpu=supported(value(device, "utilization_percent")), memory=0)


def nvmlDeviceGetCurrentClocksEventReasons(device):  # noqa: N802
    if int(nvmlSystemGetDriverVersion().partition(".")[0]) < 535:
        raise NVMLError("Function Not Found")
    return nvmlDeviceGetCurrentClocksThrottleReasons(device)


def nvmlDeviceGetComputeRunningProcesses(device):  # noqa: N802
    return [Numbers(pid=pid, usedGpuMemory=used) for pid, used in value(device, "processes")]


def nvmlDeviceGetNvLinkState(device, link):  # noqa: N802
    if link >= value(device, "links"):
        raise NVMLError("Invalid Argument")
    return 1
