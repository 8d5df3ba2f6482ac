"""The suite's tables about memory, collective operations and training steps."""

from tprimat import units
from tprimat.analyze import probes as figures
from tprimat.records.schema import ProbeRecord
from tprimat.report.probes import Probes, of_kind, refusals, time_of
from tprimat.report.tables import table


def system(probes: Probes) -> str:
    """The machine and its software, as they named themselves."""
    newest = max(probes, key=lambda probe: probe.started_at)
    machine = newest.machine
    most = max((probe.machine.gpus or 1 for probe in probes), default=1)
    rows = [
        ["accelerator", machine.accelerator or units.ABSENT],
        ["devices used at most", units.count(most)],
        ["memory of each", units.gibibytes(machine.memory_bytes)],
        ["power limit", units.si(machine.power_limit_watts, "W")],
        ["driver", machine.driver or units.ABSENT],
        *([name, version] for name, version in sorted(newest.software.items())),
        ["measured", f"{min(probe.started_at for probe in probes)} to {newest.started_at}"],
    ]
    others = [one for one in figures.settings_of(probes) if one != figures.setting_of(machine, newest.software)]
    notes = [f"Some figures were measured under driver {one.driver} with torch {one.torch}." for one in others]
    return "\n\n".join([table(["property", "value"], rows, left=2), *notes])


def memory(probes: Probes) -> str | None:
    """Bandwidth of the device's memory."""
    rows = [
        [
            probe.kind,
            units.message_size(probe.shape["array_bytes"]),
            time_of(probe),
            units.si(rate.value, "B/s"),
            units.percent(figures.share_of_bandwidth(probe)),
        ]
        for probe in of_kind(probes, "copy", "triad", "fill")
        if (rate := figures.bandwidth(probe))
    ]
    return table(["operation", "array", "median time", "bandwidth", "of data sheet"], rows) if rows else None


def collectives(probes: Probes) -> str | None:
    """Latency, algorithm and bus bandwidth."""
    chosen = of_kind(probes, *figures.BUS_FACTORS, "collectives")
    rows = [
        [
            probe.kind,
            probe.variant or units.ABSENT,
            units.count(probe.shape["ranks"]),
            units.message_size(probe.shape["message_bytes"]),
            time_of(probe),
            units.si(rate.value, "B/s"),
            units.si(figures.bus_bandwidth(probe), "B/s"),
        ]
        for probe in chosen
        if (rate := figures.bandwidth(probe))
    ]
    header = ["operation", "library", "ranks", "message", "median time", "algorithm bandwidth", "bus bandwidth"]
    return (table(header, rows, left=2) if rows else "") + refusals(chosen) or None


def mlp(probes: Probes) -> str | None:
    """The three-layer network."""
    parts = []
    for probe in of_kind(probes, "mlp_step"):
        rate, flops = figures.samples_per_second(probe), figures.flop_rate(probe)
        if rate and flops:
            rows = [
                ["weights", units.count(probe.shape["weights"])],
                ["batch", units.count(probe.shape["batch"])],
                ["steps", units.count(len(probe.seconds))],
                ["total time", units.seconds(sum(probe.seconds))],
                ["**samples a second**", f"**{units.count(rate.value)}**"],
                ["time of a step", time_of(probe)],
                ["rate", units.teraflops(flops.value)],
            ]
            parts.append(table(["metric", "value"], rows))
    return "\n\n".join(parts) + refusals(of_kind(probes, "mlp_step")) or None


def transformer_models(probes: Probes) -> str | None:
    """The architectures that were trained."""
    rows = [
        [
            probe.variant or units.ABSENT,
            *(str(probe.shape[key]) for key in ("layers", "heads", "hidden", "ffn")),
            units.count(probe.shape["parameters"]),
        ]
        for probe in of_kind(probes, "transformer_step")
    ]
    return table(["model", "layers", "heads", "width", "feed-forward", "parameters"], rows) if rows else None


def transformer_results(probes: Probes) -> str | None:
    """Throughput of one device."""
    chosen = of_kind(probes, "transformer_step")
    rows = [training_row(probe, probes) for probe in chosen if probe.seconds]
    header = ["model", "batch", "sequence", "tokens/s", "rate, 6N", "rate, causal", "of dense peak", "of fastest product"]
    return (table([*header, "memory", "step"], rows) if rows else "") + refusals(chosen) or None


def training_row(probe: ProbeRecord, probes: Probes) -> list[str]:
    """One model on one device, beside all that was measured there."""
    tokens, rate = figures.tokens_per_second(probe), figures.flop_rate(probe)
    return [
        probe.variant or units.ABSENT,
        str(probe.shape["batch"]),
        str(probe.shape["sequence"]),
        units.count(tokens.value if tokens else None),
        units.teraflops(figures.six_n_rate(probe)),
        units.teraflops(rate.value if rate else None),
        units.percent(figures.share_of_peak(probe)),
        units.percent(figures.share_of_fastest_product(probe, probes)),
        units.gibibytes(probe.peak_allocated_bytes),
        time_of(probe),
    ]


def ddp(probes: Probes) -> str | None:
    """Scaling from one device to all: efficiency is throughput over ranks times the throughput of one."""
    chosen = of_kind(probes, "ddp_step", "ddp")
    parts = []
    for name in dict.fromkeys(probe.variant for probe in chosen if probe.seconds):
        steps = sorted((p for p in chosen if p.variant == name and p.seconds), key=lambda probe: probe.shape["ranks"])
        parts.append(f"### {name}\n\n{scaling_table(steps)}")
    return "\n\n".join(parts) + refusals(chosen) or None


def scaling_table(steps: Probes) -> str:
    """One model, by ranks."""
    rows = []
    for probe in steps:
        ranks, tokens, total = probe.shape["ranks"], figures.tokens_per_second(probe), figures.six_n_rate(probe)
        rows.append(
            [
                str(ranks),
                units.count(probe.shape["batch"] * ranks),
                units.count(tokens.value if tokens else None),
                units.teraflops(total),
                units.teraflops(None if total is None else total / ranks),
                units.gibibytes(probe.peak_allocated_bytes),
                units.percent(figures.scaling_efficiency(probe, steps)),
                time_of(probe),
            ]
        )
    header = ["devices", "global batch", "tokens/s", "rate in all, 6N", "of each", "memory of each", "scaling efficiency", "step"]
    return table(header, rows, left=0)
