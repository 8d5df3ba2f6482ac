"""How fast a machine multiplies, moves memory and exchanges between GPUs: from its own probes, or from published figures.

Between probed shapes a product's rate is their mean, weighted by closeness in the logarithms of the three dimensions. Probes in
a search for the fastest shape run at clocks that no training keeps, and do not count.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median

from tprimat.core.accelerators import Accelerator
from tprimat.core.rows import DATA, document
from tprimat.records.schema import ProbeRecord

PRODUCT_KINDS = ("gemm", "model_gemm", "fprop")
PASS_KINDS = ("dgrad", "wgrad", "grouped_fprop", "grouped_dgrad", "grouped_wgrad")
"""Products that are measured apart: their operands lie differently in memory, or many small ones run as one."""
ROUND_KINDS = ("gemm_warm", "gemm_sustained")
BUS_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
BESIDE = " beside products"
ALIKE = {("fp8", "wgrad"): "dgrad"}
"""Products of the same kernels: in fp8 both operands of either lie with the summed dimension contiguous, and partial sums move to
fp32."""
UNDER_LOAD = ", under load"
"""Ends the variants of products that were measured at the clock of sustained work."""
FIGURES = document(DATA / "prediction.yaml")
ASSUMED: Mapping[str, float] = FIGURES["rates"]
OF_VENDORS: Mapping[str, Mapping[str, float]] = FIGURES["by_vendor"]


Sample = tuple[float, float, float, float]
"""log2 of m, n, k of a product, and FLOP/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """One machine."""

    accelerator: str
    source: str
    """probes or published figures, in words."""
    measured: bool
    flops: Mapping[str, float]
    """dtype -> FLOP/s of large products, sustained."""
    products: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    """dtype -> log2 of m, n, k, and FLOP/s."""
    passes: Mapping[tuple[str, str], tuple[Sample, ...]] = field(default_factory=dict)
    """dtype and kind, of PASS_KINDS -> the same. wgrad adds to an fp32 sum; m, n, k of grouped products are one expert's."""
    attention: tuple[tuple[int, int, int, float, float], ...] = ()
    """Width of a head, tokens of a sequence, heads of all sequences, FLOP/s forward, FLOP/s backward; by causal FLOP."""
    attention_flops: tuple[float, float]
    torch_attention: float = 1.0
    """Speed of torch's own attention, where nothing is measured."""
    bandwidth: float
    """Bytes/s read and written."""
    region_bandwidth: float | None = None
    """The same in compiled element-wise regions; None: not measured, as `bandwidth`."""
    collectives: Mapping[tuple[str, int], tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """Kind and ranks -> message bytes and seconds, ascending."""
    link: float
    """Bytes/s of a large collective between all GPUs of a node, one direction."""
    link_peers: int | None = None
    """GPUs that share `link`, each by links of its own; None: a group of any size has all of it."""
    network: float
    """Bytes/s of one GPU to other nodes, one direction."""
    gpus_per_node: int
    link_gpus: int = 1
    """GPUs that `link` joins across nodes."""
    launch_seconds: float = ASSUMED["launch_seconds"]
    overlapped: tuple[tuple[int, float], ...] = tuple((size, share) for size, share in FIGURES["overlapped_shares"])
    """Message bytes -> of an exchange beside products, the part by which both together take longer; ascending."""

    def product_seconds(self, m: int, n: int, k: int, dtype: str, kind: str = "fprop") -> float:
        """Return how long one product of (m, k) and (k, n) takes; a kind that is not measured is as fast as fprop."""
        samples = self.passes.get((dtype, kind)) or self.passes.get((dtype, ALIKE.get((dtype, kind), kind)))
        samples = samples or self.products.get(dtype, ())
        return 2.0 * m * n * k / _rate(samples, m, n, k, self.flops[dtype])

    def adds_gradients(self, dtype: str, kind: str) -> bool:
        """Return whether the seconds of wgrad are measured, and so contain reading and writing the fp32 sum."""
        return kind == "wgrad" and (dtype, kind) in self.passes

    def attention_seconds(self, flop: float, tokens: int, heads: int, width: int, *, backward: bool) -> float:
        """Return how long causal attention of so many FLOP takes, as measured at the nearest width, then length, then heads."""
        if not self.attention:
            return flop / self.attention_flops[backward]

        def distance(sample: tuple[int, int, int, float, float]) -> tuple[float, ...]:
            return tuple(abs(math.log(there / here)) for there, here in zip(sample, (width, tokens, heads), strict=False))

        *_, forward_rate, backward_rate = min(self.attention, key=distance)
        return flop / (backward_rate if backward else forward_rate)

    def overlapped_share(self, size: float) -> float:
        """Return the part of an exchange that stays visible beside products, at the measured message nearest to `size` bytes."""
        return min(self.overlapped, key=lambda sample: abs(math.log(sample[0] / max(size, 1))))[1]

    def slowdown_seconds(self, kind: str, size: float, ranks: int, stride: int, message: float) -> float:
        """Return by how much an exchange lengthens the products beside it, in messages of so many bytes.

        An exchange over the network or few links moves fewer bytes a second, and takes as much less of the memory that products
        wait for. The other arguments are those of exchange_seconds.
        """
        seconds = self.exchange_seconds(kind, size, ranks, stride)
        if ranks > self.linked(stride) or self.link_peers:
            seconds = min(seconds, _moved(kind, size, ranks) / self.link)
        return self.overlapped_share(message) * seconds

    def linked(self, stride: int) -> int:
        """Return how many ranks of a group at this distance are joined by links."""
        return max(1, max(self.gpus_per_node, self.link_gpus) // stride)

    def exchange_seconds(self, kind: str, size: float, ranks: int, stride: int = 1, outside_share: float = 1.0) -> float:
        """Return how long a collective of BUS_KINDS takes, of so many bytes in all: gathered, before scattering, or sent.

        `stride`: distance of neighbors in the group; groups of neighbors share the network of a node. `outside_share`: of what
        all_to_all sends to other nodes, the part that passes the network; links copy it there.
        """
        if ranks < 2 or size <= 0:
            return 0.0
        here = self.linked(stride)
        if ranks <= here and (samples := self.collectives.get((kind, ranks))):
            return _interpolated(samples, size)
        moved, peers = _moved(kind, size, ranks), 1 if kind == "send_recv" else max(1, min(ranks, here) - 1)
        link = self.link * min(1.0, peers / self.link_peers) if self.link_peers else self.link
        if ranks <= here:
            return moved / link + ASSUMED["link_latency_seconds"] * math.log2(ranks)
        if kind == "all_to_all":
            outside = outside_share * moved * (ranks - here) / (ranks - 1)
            return outside / self.network + (moved - outside) / link + ASSUMED["network_latency_seconds"] * math.log2(ranks)
        wide = min(link, self.network * (1 if kind == "send_recv" else here))
        return moved / wide + ASSUMED["network_latency_seconds"] * math.log2(ranks)


@lru_cache(maxsize=65536)
def _rate(samples: tuple[Sample, ...], m: int, n: int, k: int, otherwise: float) -> float:
    if not samples:
        return otherwise
    place = (math.log2(m), math.log2(n), math.log2(k))
    distances = [sum((here - there) ** 2 for here, there in zip(place, sample[:3], strict=True)) for sample in samples]
    nearest = min(distances)
    weights = [math.exp((nearest - distance) / (2 * ASSUMED["near_octaves"] ** 2)) for distance in distances]
    return sum(weight * sample[3] for weight, sample in zip(weights, samples, strict=True)) / sum(weights)


def _moved(kind: str, size: float, ranks: int) -> float:
    """Return the bytes that each rank sends."""
    steps = {"all_reduce": 2.0, "send_recv": ranks / (ranks - 1)}.get(kind, 1.0) if ranks > 1 else 0.0
    return size * steps * (ranks - 1) / ranks


def _interpolated(samples: Sequence[tuple[int, float]], size: float) -> float:
    """Return the seconds of a message between two that were measured, or by the bandwidth of the largest."""
    largest, seconds = samples[-1]
    if size >= largest:
        return seconds * size / largest
    if size <= samples[0][0]:
        return samples[0][1]
    after = next(number for number, (measured, _) in enumerate(samples) if measured > size)
    (low, low_seconds), (high, high_seconds) = samples[after - 1], samples[after]
    share = (size - low) / (high - low)
    return low_seconds + share * (high_seconds - low_seconds)


def published_rates(accelerator: Accelerator, gpus_per_node: int) -> Rates:
    """Return the rates of an accelerator without probes, from its data sheet and published measurements."""
    usual = usual_share(accelerator)
    flops: dict[str, float] = {
        dtype: ASSUMED["sustained_share"] * measured if (measured := accelerator.measured_flops.get(dtype)) else usual * peak
        for dtype, peak in accelerator.dense_flops.items()
    }
    half = flops.get("bf16") or flops.get("fp16") or max(flops.values())
    link = accelerator.link_bytes_per_second or 2 * accelerator.network_bytes_per_second
    return Rates(
        accelerator=accelerator.name,
        source=f"published figures of {accelerator.name}",
        measured=False,
        flops=flops,
        attention_flops=(half * ASSUMED["attention_forward_share"], half * ASSUMED["attention_backward_share"]),
        torch_attention=OF_VENDORS["torch_attention"][accelerator.vendor],
        bandwidth=accelerator.bandwidth_bytes_per_second * ASSUMED["bandwidth_share"],
        link=link / 2 * ASSUMED["mesh_share" if accelerator.link_peers else "link_share"],
        link_peers=accelerator.link_peers,
        network=accelerator.network_bytes_per_second * ASSUMED["network_share"],
        gpus_per_node=gpus_per_node,
        link_gpus=accelerator.link_gpus,
    )


def usual_share(accelerator: Accelerator) -> float:
    """Return the sustained share of the peak for a dtype that nobody has measured: that of bf16, else the usual one."""
    measured = accelerator.measured_flops.get("bf16")
    usual = OF_VENDORS["usual_share"][accelerator.vendor]
    return ASSUMED["sustained_share"] * measured / accelerator.dense_flops["bf16"] if measured else usual


def probed_rates(probes: Iterable[ProbeRecord], accelerator: Accelerator, gpus_per_node: int) -> Rates:
    """Return the rates of a machine by its own probes; what no probe measured is as published."""
    published = published_rates(accelerator, gpus_per_node)
    usable = _newest(probe for probe in probes if probe.seconds)
    loaded = {product_of(probe) for probe in usable if under_load(probe)}
    products: dict[str, list[Sample]] = {}
    collectives: dict[tuple[str, int], list[tuple[int, float]]] = {}
    passes: dict[tuple[str, str], list[Sample]] = {}
    halves: dict[tuple[int, int, int], dict[bool, float]] = {}
    copies, regions, launches = [], [], []
    kept = sustained_shares(usable)
    for probe in usable:
        seconds, shape = median(probe.seconds), probe.shape
        sustained = 1.0 if under_load(probe) else kept.get(probe.dtype, 1.0)
        if not under_load(probe) and product_of(probe) in loaded:
            continue  # a burst, whose clock no training run keeps
        if probe.kind in PRODUCT_KINDS and probe.flop and "searched" not in (probe.variant or ""):
            products.setdefault(probe.dtype, []).append((*_place(shape), sustained * probe.flop / seconds))
        elif probe.kind in PASS_KINDS and probe.flop:
            rate = sustained * probe.flop / seconds
            passes.setdefault((probe.dtype, probe.kind), []).append((*_place(shape), rate))
        elif probe.kind in {"attention_forward", "attention_backward"} and probe.flop:
            backward = probe.kind.endswith("backward")
            rates = halves.setdefault((shape["head_dim"], shape["sequence"], shape["batch"] * shape["heads"]), {})
            rates[backward] = max(rates.get(backward, 0.0), sustained * probe.flop / seconds)
        elif probe.kind == "copy" and probe.bytes:
            copies.append(probe.bytes / seconds)
        elif probe.kind == "region" and probe.bytes:
            regions.append(probe.bytes / seconds)
        elif probe.kind == "launch" and probe.variant == "autograd":
            launches.append(seconds / shape["launches"])
        elif probe.kind in BUS_KINDS and "message_bytes" in shape and "ranks" in shape:
            collectives.setdefault((probe.kind, shape["ranks"]), []).append((shape["message_bytes"], seconds))
    flops = {dtype: median(sorted(sample[3] for sample in samples)[-8:]) for dtype, samples in products.items()}
    return replace(
        published,
        source=f"probes of {accelerator.name}",
        measured=True,
        flops={**published.flops, **flops},
        products={dtype: tuple(samples) for dtype, samples in products.items()},
        passes={key: tuple(samples) for key, samples in passes.items()},
        attention=tuple((*place, times[False], times[True]) for place, times in sorted(halves.items()) if len(times) == 2),
        bandwidth=max(copies, default=published.bandwidth),
        region_bandwidth=max(regions, default=None),  # a host that launches too slowly makes one look slower
        collectives={key: tuple(sorted(samples)) for key, samples in collectives.items()},
        launch_seconds=max(launches, default=published.launch_seconds),
        overlapped=_overlapped(usable) or published.overlapped,
    )


def sustained_shares(probes: Iterable[ProbeRecord]) -> dict[str, float]:
    """Return by dtype the share of a warm product's rate that load leaves: the power cap lowers the clock of a training run.

    It is the median over the products that were measured both ways (tprimat probe rounds).
    """
    rates: dict[tuple[str, tuple[int, ...]], dict[str, list[float]]] = {}
    for probe in probes:
        if probe.kind in ROUND_KINDS and probe.flop and probe.seconds:
            place = rates.setdefault((probe.dtype, tuple(probe.shape[side] for side in ("m", "n", "k"))), {})
            place.setdefault(probe.kind, []).append(probe.flop / median(probe.seconds))
    shares: dict[str, list[float]] = {}
    for (dtype, _), kinds in rates.items():
        if len(kinds) == len(ROUND_KINDS):
            warm, sustained = (median(kinds[kind]) for kind in ROUND_KINDS)
            shares.setdefault(dtype, []).append(min(1.0, sustained / warm))
    return {dtype: median(of_dtype) for dtype, of_dtype in shares.items()}


def _newest(probes: Iterable[ProbeRecord]) -> list[ProbeRecord]:
    """Return the last measurement of each operation and shape; an older one may come from another version of the software."""
    last = {}
    for probe in sorted(probes, key=lambda probe: probe.started_at):
        last[probe.kind, probe.variant, probe.dtype, tuple(sorted(probe.shape.items()))] = probe
    return list(last.values())


def product_of(probe: ProbeRecord) -> tuple[object, ...]:
    """Return what is equal for two measurements of the same product."""
    return probe.kind, probe.dtype, *sorted(probe.shape.items())


def under_load(probe: ProbeRecord) -> bool:
    """Return whether a product was measured at the clock of sustained work."""
    return (probe.variant or "").endswith(UNDER_LOAD)


def _place(shape: Mapping[str, int]) -> tuple[float, float, float]:
    return math.log2(shape["m"]), math.log2(shape["n"]), math.log2(shape["k"])


def _overlapped(probes: Sequence[ProbeRecord]) -> tuple[tuple[int, float], ...]:
    """Return (both at once - products alone) / exchange alone by message size: the median of all exchanges measured so."""
    times: dict[tuple[str | None, int, int], list[float]] = {}
    for probe in probes:
        if probe.kind == "overlapped":
            place = (probe.variant, probe.shape["ranks"], probe.shape.get("message_bytes", 0))
            times.setdefault(place, []).append(median(probe.seconds))
    shares: dict[int, list[float]] = {}
    for (variant, ranks, size), both in times.items():
        name = (variant or "").removesuffix(BESIDE)
        alone, products = times.get((name, ranks, size)), times.get(("products", ranks, 0))
        if name != variant and alone and products:
            visible = (median(both) - median(products)) / median(alone)
            shares.setdefault(size, []).append(min(1.0, max(0.0, visible)))
    return tuple(sorted((size, median(of_size)) for size, of_size in shares.items()))
