"""Which GPUs a machine has, asked from the vendors' tools: no torch, no CUDA context, and an answer in well under a second."""

import csv
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tprimat.facts.platforms import Backend

PATIENCE_SECONDS = 10.0
"""For a tool that has to wake the driver first; usually it answers at once."""
UNIT_BYTES = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
"""amd-smi says MB and counts in powers of two, as rocm-smi's bytes for the same GPU show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as a vendor's tool names it."""

    platform: Backend
    name: str | None
    index: int | None = None
    """As the tool counts, whatever the run can see of them."""
    uuid: str | None = None
    memory_bytes: int | None = None
    power_limit_watts: float | None = None
    driver: str | None = None


def visible_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that a framework started with this environment would see; empty when there are none, or no tool to ask."""
    gpus = nvidia_gpus()
    if gpus:
        return chosen(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    gpus = rocm_smi_gpus() or amd_smi_gpus()
    # ROCR's list is cut first, below HIP, which then counts what is left. HIP reads CUDA's variable where its own is absent.
    gpus = chosen(gpus, environment.get("ROCR_VISIBLE_DEVICES"))
    return chosen(gpus, environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES")))


def chosen(gpus: Sequence[Gpu], wanted: str | None) -> tuple[Gpu, ...]:
    """What a *_VISIBLE_DEVICES variable leaves: indices or UUID prefixes; the first wrong entry ends the list, as in CUDA."""
    if wanted is None:
        return tuple(gpus)
    left: list[Gpu] = []
    for word in (part.strip() for part in wanted.split(",")):
        if word.startswith("MIG-"):  # a slice: its name and memory are not those of the whole GPU
            left.append(Gpu(platform="cuda", name=None, uuid=word, driver=gpus[0].driver if gpus else None))
            continue
        match = gpu_named(gpus, word)
        if match is None:
            break
        left.append(match)
    return tuple(left)


def gpu_named(gpus: Sequence[Gpu], word: str) -> Gpu | None:
    """By index or by the beginning of its UUID."""
    if word.isdigit():
        return gpus[int(word)] if int(word) < len(gpus) else None
    if not word.startswith("GPU-"):
        return None
    return next((gpu for gpu in gpus if gpu.uuid is not None and gpu.uuid.startswith(word)), None)


def nvidia_gpus() -> tuple[Gpu, ...]:
    """From nvidia-smi."""
    fields = "name,uuid,memory.total,power.limit,driver_version"
    text = answer(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    rows = [[cell.strip() for cell in row] for row in csv.reader((text or "").splitlines())]
    return tuple(
        Gpu(
            platform="cuda",
            name=name,
            index=index,
            uuid=uuid,
            memory_bytes=scaled(memory, 1 << 20),
            power_limit_watts=number(power),
            driver=driver,
        )
        for index, (name, uuid, memory, power, driver) in enumerate(row for row in rows if len(row) == 5)
    )


def rocm_smi_gpus() -> tuple[Gpu, ...]:
    """From rocm-smi; newer releases write "Card Series", older ones "Card series"."""
    text = answer(["rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showmaxpower", "--showdriverversion", "--json"])
    cards = {name: {key.lower(): value for key, value in card.items()} for name, card in document(text, dict).items()}
    driver = cards.get("system", {}).get("driver version")
    numbers = sorted(int(name[4:]) for name in cards if name[4:].isdigit())
    return tuple(
        Gpu(
            platform="rocm",
            name=card.get("card series"),
            index=index,
            uuid=card.get("unique id"),
            memory_bytes=scaled(card.get("vram total memory (b)"), 1),
            power_limit_watts=number(card.get("max graphics package power (w)")),
            driver=driver,
        )
        for index, card in ((number, cards[f"card{number}"]) for number in numbers)
    )


def amd_smi_gpus() -> tuple[Gpu, ...]:
    """From amd-smi, which replaces rocm-smi; newer releases put the list under gpu_data."""
    found = document(answer(["amd-smi", "static", "--asic", "--vram", "--driver", "--limit", "--json"]), (dict, list))
    cards = found.get("gpu_data", []) if isinstance(found, dict) else found
    return tuple(
        Gpu(
            platform="rocm",
            name=within(card, "asic", "market_name"),
            index=card.get("gpu"),
            memory_bytes=scaled(
                within(card, "vram", "size", "value"), UNIT_BYTES.get(str(within(card, "vram", "size", "unit")), 1)
            ),
            power_limit_watts=number(within(card, "limit", "socket_power_limit", "value")),
            driver=within(card, "driver", "version"),
        )
        for card in cards
        if isinstance(card, dict)
    )


def answer(argv: Sequence[str]) -> str | None:
    """What a tool prints; None where it is missing, fails, or does not answer."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def document(text: str | None, kinds: Any) -> Any:
    """JSON of one of the kinds; an empty dict for anything else. Tools print warnings before it."""
    lines = (text or "").splitlines()
    start = next((index for index, line in enumerate(lines) if line.lstrip()[:1] in {"{", "["}), len(lines))
    try:
        found = json.loads("\n".join(lines[start:]))
    except ValueError:
        return {}
    return found if isinstance(found, kinds) else {}


def within(value: Any, *keys: str) -> Any:
    """A value inside nested dicts; None where a key or a dict is missing, or the tool says N/A."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return None if value == "N/A" else value


def number(text: Any) -> float | None:
    """None for [N/A], [Not Supported] and the like."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def scaled(text: Any, unit: int) -> int | None:
    """A number in units of bytes."""
    value = number(text)
    return None if value is None else round(value * unit)


def common(values: Iterable[Any]) -> Any:
    """The value that all share, else None."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
