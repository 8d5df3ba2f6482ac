"""What a machine offers a training besides software (GPUs, network, shared memory, disk, SLURM), and what to do about it."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tprimat.hardware.gpus import Gpu, amd_smi_cards, nested, open_nvml, query_nvml, to_float, visible_gpus
from tprimat.hardware.nodes import expand_hosts

GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_MEMORY_BYTES = GIB
"""NCCL and the data loaders take some hundred MiB of it on eight GPUs; Docker gives a container 64 MiB."""
ENOUGH_DISK_BYTES = GIB
"""Records and logs of some hundred runs, and a trace."""
NAME_SECONDS = 5.0
"""Longest wait for a name server."""
UNCORRECTED, SINCE_BOOT = 1, 0
"""NVML's kinds of ECC errors and of counters."""
KERNEL_LOG = Path("/dev/kmsg")
RECORD_BYTES = 1 << 13
"""The longest record of the kernel's log, which gives one with each read."""
XID = re.compile(r"NVRM: Xid \(PCI:(?P<address>[0-9a-fA-F:]+)[^)]*\): (?P<number>\d+),?(?P<text>.*)")
XID_MEANINGS = {
    13: "a program's exception",
    31: "a program's access to memory that is not its own",
    43: "a program's channel was reset",
    45: "a program ended in the middle of its work",
    48: "memory error that could not be corrected",
    63: "a faulty row of its memory is to be replaced",
    64: "a faulty row of its memory could not be replaced",
    74: "NVLink error",
    79: "fell off the bus",
    92: "many memory errors that were corrected",
    94: "memory error that ended one program",
    95: "memory error that ends all programs on it",
    119: "its system processor does not answer",
    120: "error of its system processor",
}
"""NVIDIA, XID Errors (docs.nvidia.com/deploy/xid-errors), in short words; of others the driver's own text is shown."""
PROGRAM_XIDS = {13, 31, 43, 45}
"""Usually a program's mistake, not the machine's."""
MAX_LINKS = 18
"""NVLinks of one GPU (H100, H200, B200)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Literal["ok", "absent", "problem"]
    """absent: not there, and not needed by every run."""
    finding: str
    fix: str | None = None
    """What to do, where something should be done."""


def machine_checks(output: Path, environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Look at everything but the software; `output` is where results would go."""
    gpus = visible_gpus(environment)
    yield check_gpus(gpus)
    if len(gpus) > 1 and gpus[0].platform == "cuda":
        yield check_links(gpus)
    if gpus:
        yield check_errors(gpus)
    if (gpus and gpus[0].platform == "cuda") or xid_lines():  # a GPU that fell off the bus is no GPU any more
        yield check_xids(gpus)
    yield check_host_name(socket.gethostname())
    yield check_port()
    yield check_shared_memory(SHARED_MEMORY)
    yield check_disk(output)
    yield check_slurm(environment)


def check_gpus(gpus: tuple[Gpu, ...]) -> Check:
    """Name the GPUs that a run would see."""
    if not gpus:
        fix = "if there are GPUs: nvidia-smi or amd-smi must list them, in a container with --gpus all or --device /dev/kfd"
        return Check(name="GPUs", status="absent", finding="none: runs show that a strategy works, not how fast it is", fix=fix)
    names = list(dict.fromkeys(gpu.name or "unnamed" for gpu in gpus))
    parts = [f"{len(gpus)} x {' + '.join(names)}"]
    if gpus[0].memory_bytes:
        parts.append(f"{gpus[0].memory_bytes / GIB:.0f} GiB")
    if gpus[0].driver:
        parts.append(f"driver {gpus[0].driver}")
    if len(names) > 1:
        variable = "ROCR_VISIBLE_DEVICES" if gpus[0].platform == "rocm" else "CUDA_VISIBLE_DEVICES"
        fix = f"choose equal ones with {variable}: the slowest decides the speed of a step"
        return Check(name="GPUs", status="problem", finding=", ".join(parts), fix=fix)
    return Check(name="GPUs", status="ok", finding=", ".join(parts))


def check_links(gpus: tuple[Gpu, ...]) -> Check:
    """Count the NVLinks of each NVIDIA GPU."""
    try:
        nvml = open_nvml()
    except LookupError as error:
        return Check(name="NVLink", status="absent", finding=str(error))
    links = [
        [query_nvml(nvml, "nvmlDeviceGetNvLinkState", device, link) for link in range(MAX_LINKS)]
        for _, device in devices_of(nvml, gpus)
    ]
    counts = [sum(state == 1 for state in states) for states in links]
    if not any(counts):
        fix = "prefer strategies with little communication, such as minimal_communication"
        return Check(name="NVLink", status="absent", finding="none: the GPUs exchange data over PCIe", fix=fix)
    if len(set(counts)) > 1:
        fix = "nvidia-smi nvlink --status names the links that are down"
        return Check(name="NVLink", status="problem", finding=f"active links differ: {', '.join(map(str, counts))}", fix=fix)
    return Check(name="NVLink", status="ok", finding=f"{counts[0]} active links on each GPU")


def check_errors(gpus: tuple[Gpu, ...]) -> Check:
    """Look at each GPU for memory errors that could not be corrected, and for a PCIe link narrower than it could be."""
    try:
        seen = gpu_errors(gpus)
    except LookupError as error:
        return Check(name="GPU errors", status="absent", finding=str(error))
    if seen.errors:
        tool = "amd-smi metric --ecc-blocks --pcie" if gpus[0].platform == "rocm" else "nvidia-smi -q -d ECC,ROW_REMAPPER"
        fix = f"{tool}; reset the GPU or leave it out"
        return Check(name="GPU errors", status="problem", finding="; ".join(seen.errors), fix=fix)
    parts = (("no uncorrected memory errors", seen.memory), ("full PCIe width", seen.pcie))
    found = [words if count == len(gpus) else f"{words} on {count} of {len(gpus)} GPUs" for words, count in parts if count]
    some = any(count < len(gpus) for _, count in parts)
    return Check(
        name="GPU errors",
        status="ok" if found else "absent",
        finding=(", ".join(found) or "not reported") + (" (the rest is not reported)" if found and some else ""),
    )


@dataclass(slots=True)
class GpuErrors:
    """What NVML or amd-smi reports of the GPUs."""

    errors: list[str] = field(default_factory=list)
    """A sentence on each thing that is wrong."""
    memory: int = 0
    """GPUs that count memory errors."""
    pcie: int = 0
    """GPUs that report the width of their PCIe link."""

    def add_width(self, gpu: object, width: float | None, widest: float | None) -> None:
        """Take the width of a GPU's PCIe link, and how wide it could be, in lanes."""
        self.pcie += bool(width and widest)
        if width and widest and width < widest:
            self.errors.append(f"GPU {gpu}: PCIe x{width:.0f} of x{widest:.0f}")

    def add_memory(self, gpu: object, errors: float | None) -> None:
        """Take a GPU's number of memory errors that could not be corrected."""
        self.memory += errors is not None
        if errors:
            self.errors.append(f"GPU {gpu}: {errors:.0f} uncorrected memory errors since the driver was loaded")


def gpu_errors(gpus: tuple[Gpu, ...]) -> GpuErrors:
    """Ask NVML or amd-smi what is wrong with these GPUs.

    Raises:
        LookupError: neither can be asked.
    """
    if gpus and gpus[0].platform == "rocm":
        return amd_errors(gpus)
    nvml, found = open_nvml(), GpuErrors()
    for gpu, device in devices_of(nvml, gpus):
        found.add_memory(gpu.index, query_nvml(nvml, "nvmlDeviceGetTotalEccErrors", device, UNCORRECTED, SINCE_BOOT))
        _, _, pending, failed = query_nvml(nvml, "nvmlDeviceGetRemappedRows", device) or (0, 0, 0, 0)
        if failed:
            found.errors.append(f"GPU {gpu.index}: a faulty row of its memory could not be replaced")
        elif pending:
            found.errors.append(f"GPU {gpu.index}: a faulty row of its memory is replaced at the next reset")
        found.add_width(gpu.index, *(query_nvml(nvml, f"nvmlDeviceGet{kind}PcieLinkWidth", device) for kind in ("Curr", "Max")))
    return found


def devices_of(nvml: Any, gpus: Iterable[Gpu]) -> list[tuple[Gpu, Any]]:
    """Return NVML's handle of each GPU that it knows."""
    found = ((gpu, query_nvml(nvml, "nvmlDeviceGetHandleByUUID", gpu.uuid)) for gpu in gpus if gpu.uuid is not None)
    return [(gpu, device) for gpu, device in found if device is not None]


def amd_errors(gpus: tuple[Gpu, ...]) -> GpuErrors:
    """Ask amd-smi what is wrong with these GPUs.

    Raises:
        LookupError: amd-smi is missing, too old or does not answer.
    """
    cards, built = amd_smi_cards("metric", "--ecc", "--pcie"), amd_smi_cards("static", "--bus")
    counts = {gpu.index: to_float(nested(cards.get(gpu.index), "ecc", "total_uncorrectable_count")) for gpu in gpus}
    if all(count is None for count in counts.values()):
        raise LookupError("amd-smi is not installed, or does not count errors here")
    found = GpuErrors()
    for index, errors in counts.items():
        found.add_memory(index, errors)
        widths = ((cards, ("pcie", "width")), (built, ("bus", "max_pcie_width")))
        found.add_width(index, *(to_float(nested(of.get(index), *keys)) for of, keys in widths))
    return found


def check_xids(gpus: tuple[Gpu, ...]) -> Check:
    """Look into the kernel's log for errors that NVIDIA's driver has reported since the machine started."""
    lines = xid_lines()
    if lines is None:
        finding = "the kernel's log cannot be read here"
        return Check(
            name="XID errors", status="absent", finding=finding, fix="sudo dmesg | grep Xid shows what the driver reported"
        )
    machine, programs = xid_errors(lines, gpus)
    if machine:
        fix = "NVIDIA's list of XID errors says what each asks for; reset the GPU, or leave it out"
        return Check(name="XID errors", status="problem", finding="; ".join(machine), fix=fix)
    finding = "; ".join(programs) or "none in the kernel's log"
    return Check(name="XID errors", status="ok", finding=finding)


def xid_errors(lines: Iterable[str], gpus: tuple[Gpu, ...]) -> tuple[list[str], list[str]]:
    """Return a sentence on each kind of XID error and GPU: those of the machine, and those that programs cause.

    A GPU that is not among `gpus` is named by its PCI address.
    """
    index_of = pci_addresses(gpus)
    times: Counter[tuple[str, int]] = Counter()
    texts = {}
    for found in filter(None, map(XID.search, lines)):
        key = (found["address"].lower(), int(found["number"]))
        times[key] += 1
        texts[key] = XID_MEANINGS.get(key[1]) or found["text"].rpartition(", ")[2].strip(" .")
    machine: list[str] = []
    programs: list[str] = []
    for (address, number), count in times.items():
        name = f"GPU {index_of[address]}" if address in index_of else f"the GPU at PCI {address}"
        often = "" if count == 1 else f", {count} times"
        sentence = f"{name}: XID {number} ({texts[address, number]}){often}"
        (programs if number in PROGRAM_XIDS else machine).append(sentence)
    return machine, programs


def pci_addresses(gpus: tuple[Gpu, ...]) -> dict[str, int]:
    """Return PCI address, as the kernel writes it ('0000:3b:00'), -> number of the GPU."""
    try:
        nvml = open_nvml()
    except LookupError:
        return {}
    found = {}
    for gpu, device in devices_of(nvml, gpus):
        place = query_nvml(nvml, "nvmlDeviceGetPciInfo", device)
        if place is not None and gpu.index is not None:
            found[f"{place.domain:04x}:{place.bus:02x}:{place.device:02x}"] = gpu.index
    return found


def xid_lines(log: Path | None = None) -> list[str] | None:
    """Return the lines of the kernel's log with an XID error; None where the log cannot be read, as in most containers.

    The kernel keeps the newest lines only.
    """
    try:
        descriptor = os.open(log or KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    data = b""
    try:
        while True:
            try:
                piece = os.read(descriptor, RECORD_BYTES)
            except BrokenPipeError:  # the kernel has overwritten the next record
                continue
            if not piece:
                break
            data += piece
    except OSError:  # would block: the end of the log; or not permitted
        pass
    finally:
        os.close(descriptor)
    return [line for line in data.decode("utf8", errors="replace").splitlines() if XID.search(line)] if data else None


def check_host_name(name: str, limit_seconds: float = NAME_SECONDS) -> Check:
    """Look the host's name up, which only runs on several nodes need."""
    fix = f"nothing for one node; for several give MASTER_ADDR as an IP address, or add {name} to /etc/hosts"
    began = time.monotonic()
    try:  # getaddrinfo has no time limit
        done = subprocess.run(["getent", "ahosts", name], capture_output=True, text=True, timeout=limit_seconds, check=False)
    except subprocess.TimeoutExpired:
        finding = f"{name}: the name server has not answered for {limit_seconds:.0f} s"
        return Check(name="host name", status="problem", finding=finding, fix=fix)
    except OSError as error:
        return Check(name="host name", status="absent", finding=f"getent cannot be started: {error.strerror}", fix=fix)
    if done.returncode:
        finding = f"{name} does not resolve after {time.monotonic() - began:.1f} s"
        return Check(name="host name", status="absent", finding=finding, fix=fix)
    return Check(name="host name", status="ok", finding=f"{name} is {done.stdout.split()[0]}")


def check_port() -> Check:
    """Open a port on the loopback and connect to it, as the ranks of a run do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=NAME_SECONDS).close()
    except OSError as error:
        fix = "ip link set lo up, or allow connections to 127.0.0.1"
        finding = f"no connection over the loopback: {error.strerror or error}"
        return Check(name="ports", status="problem", finding=finding, fix=fix)
    return Check(name="ports", status="ok", finding=f"the loopback connects, on port {port} for example")


def check_shared_memory(place: Path) -> Check:
    """Measure /dev/shm, over which NCCL and data loaders exchange data."""
    name = str(place)
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return Check(name=name, status="problem", finding="not there", fix="mount -t tmpfs tmpfs /dev/shm")
    finding = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB"
    if usage.free < ENOUGH_SHARED_MEMORY_BYTES:
        return Check(
            name=name, status="problem", finding=finding, fix="docker run --ipc=host or --shm-size=16g; or delete old files"
        )
    return Check(name=name, status="ok", finding=finding)


def check_disk(output: Path) -> Check:
    """Look for room and permission where results would go."""
    place = output.absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return Check(name="disk", status="problem", finding=f"{place} is not a folder", fix="another --output-dir")
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Check(name="disk", status="problem", finding=f"{place}: {error.strerror or error}", fix="another --output-dir")
    finding = f"{free / GIB:,.0f} GiB free at {place}"
    if not os.access(place, os.W_OK):
        return Check(name="disk", status="problem", finding=f"{place} may not be written", fix="another --output-dir")
    if free < ENOUGH_DISK_BYTES:
        return Check(name="disk", status="problem", finding=finding, fix="make room, or another --output-dir")
    return Check(name="disk", status="ok", finding=finding)


def check_slurm(environment: Mapping[str, str]) -> Check:
    """Say whether this is a job of SLURM."""
    if "SLURM_JOB_ID" in environment:
        nodes = expand_hosts(environment.get("SLURM_JOB_NODELIST", ""))
        finding = f"job {environment['SLURM_JOB_ID']} on {len(nodes)} node{'' if len(nodes) == 1 else 's'}"
        fix = f"srun --nodes={len(nodes)} --ntasks={len(nodes)} ./benchmark.py --nodes {len(nodes)}" if len(nodes) > 1 else None
        return Check(name="SLURM", status="ok", finding=finding, fix=fix)
    if shutil.which("srun"):
        fix = "salloc or sbatch, then start ./benchmark.py in the job"
        return Check(name="SLURM", status="absent", finding="not in a job; srun is installed", fix=fix)
    return Check(name="SLURM", status="absent", finding="not installed; nothing needs it")
