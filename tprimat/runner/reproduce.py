"""Reproduce a published row: the run that comes nearest to it on the GPUs of a machine, and the FLOP/s that it should reach.

Where the row needs more GPUs or more memory, the run is a proxy: as much of each degree of parallelism as fits, as many layers on
a stage as fit, without VPP if that leaves too many, and fewer micro-batches. Shapes, micro-batch, sequence and dtype stay.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from math import gcd

from tprimat.config.load import load_config, presets_of
from tprimat.config.options import BY_NAME
from tprimat.core.accelerators import PLATFORM_OF, PlatformName, find_accelerator, multiplies
from tprimat.core.errors import ConfigError, LaunchError
from tprimat.core.flops import flop_per_token
from tprimat.core.models import ModelShape
from tprimat.core.workload import SHORT_NAMES, FullWorkload
from tprimat.engines.base import is_installed
from tprimat.hardware.nodes import cpu_cores, this_machine
from tprimat.plan.schema import RunPlan
from tprimat.records.discover import probes_in
from tprimat.records.schema import Machine, RunRecord
from tprimat.report.explain import Against
from tprimat.report.tables import plural
from tprimat.runner.against import Side, compared, published_named, published_side
from tprimat.runner.planning import named_machine, rates_of
from tprimat.runner.prediction import gate, planned_workload
from tprimat.runner.request import RunRequest, with_values
from tprimat.runner.session import prepare

MICRO_BATCHES = 16
"""Of a replica in a step of a proxy, or four for each stage: more only repeat them."""


def nearest_run(row: str, asked: Mapping[str, str]) -> tuple[list[str], RunPlan, Against | None]:
    """Return the words of `tprimat run` that come nearest to a row, their plan, and how it differs; on a CPU nothing compares.

    `asked`: options and keys of the configuration that the user gives, such as gpu of another machine.
    """
    there, request = published_side(published_named(row)), with_values(RunRequest(), asked.items(), "--set")
    work = there.full
    if work is None or there.rates is None:
        why = "Its source leaves out one of model, accelerator, GPUs, dtype, sequence, tensor parallelism and global batch."
        raise ConfigError(f"{row} cannot be reproduced.", where=row, why=why, fix="another row of tprimat models --published")
    machine = _machine_for(row, work.format, request)
    platform = request.platform or PLATFORM_OF[machine.platform if machine else "cpu"]
    on_cpu, nodes = platform == "cpu", request.nodes or 1
    here = 2 ** (min(8, cpu_cores()).bit_length() - 1) if on_cpu else machine and machine.gpus_per_node
    each = min(work.world_size // nodes, request.gpus or here or 1)
    divided = _divided(work, nodes * each)
    stages, most = divided.pipeline_parallel, work.shape.layers * divided.pipeline_parallel // work.pipeline_parallel
    each_depth, chunks = range(most, work.shape.dense_first_layers, -1), dict.fromkeys((divided.virtual_pipeline, None))
    cuts = [(depth, virtual) for virtual in chunks for depth in each_depth if depth % (stages * (virtual or 1)) == 0]
    for depth, virtual in cuts[-1:] if on_cpu else cuts:
        divided = divided if virtual == divided.virtual_pipeline else replace(divided, virtual_pipeline=virtual)
        values = {"gpus": str(each), **_model(work.shape, depth), "tp": str(divided.tensor_parallel)}
        values |= {name: str(value) for name, key in SHORT_NAMES.items() if (value := getattr(divided, key) or 1) > 1}
        values |= {"routing": work.routing} if work.routing else {}
        values |= {} if on_cpu else _workload(divided, platform, elsewhere=request.gpu is not None)
        values |= asked
        session = prepare(replace(with_values(RunRequest(), values.items(), "--"), dry_run=True))
        plan, machine = session.plans[0], session.machine_of(session.plans[0])
        fit = gate(plan, machine)
        as_published = divided is work and depth == work.shape.layers  # which did fit there
        if fit is None or fit[0] == "fits" or (as_published and fit[0] != "does not fit"):
            words: list[str] = []
            for name, value in values.items():
                option = BY_NAME.get(name)
                if name != "gpu":
                    words += [option.flag, value] if option and option.commands else ["--set", f"{name}={value}"]
            if on_cpu:
                return words, plan, None
            accelerator, full = find_accelerator(machine.accelerator), planned_workload(plan)
            if full is None or accelerator is None:
                what = f"Nothing predicts {plan.engine} on {machine.accelerator}."
                raise ConfigError(what, where=row, fix="--set engine=megatron")
            rates = rates_of(accelerator, plan.gpus_per_node, probes_in([session.output, *session.probes])[0])
            return words, plan, compared(Side(name=plan.model, flops=0.0, known=full, full=full, rates=rates), there)
    what = f"{row} does not fit {plural(nodes * each, 'GPU')}."
    raise LaunchError(what, where=row, why="Nor do its fewest layers.", fix="more GPUs")


def _machine_for(row: str, dtype: str, request: RunRequest) -> Machine | None:
    """Return the machine that would run a row; None for a CPU. Refuses one that cannot."""
    machine = named_machine(request.gpu, "bf16") if request.gpu else this_machine()
    device = find_accelerator(machine.accelerator) if machine else None
    if device is not None and not multiplies(device, dtype):
        what = f"{row} ran in {dtype}, in which {device.name} does not multiply."
        raise ConfigError(what, where=row, fix="another row of tprimat models --published")
    if machine is None and request.platform != "cpu":
        fix = """--dry-run --set gpu="H100 SXM"; --set platform=cpu trains a tiny version, which has no speed to compare"""
        raise LaunchError("This machine shows no GPU.", where=row, fix=fix)
    return machine


def refuse_unlike(row: str, run: RunRecord) -> None:
    """Refuse a run of a model whose layers compute otherwise than those of a row, or in another dtype."""
    there, here = published_named(row).workload, run.ran
    layers = [one.shape and flop_per_token(replace(one.shape, layers=1), 1) for one in (here, there)]
    if layers[0] != layers[1] or here.matmul_dtype != there.matmul_dtype:
        other = "model" if layers[0] != layers[1] else "dtype"
        ran = f"{here.shape.name if here.shape else run.model}, {here.matmul_dtype}"
        raise ConfigError(f"{run.run_id} is not a run of {row}.", where=run.run_id, why=f"It ran {ran}: another {other}.")


def _divided(work: FullWorkload, gpus: int) -> FullWorkload:
    """Return a workload over fewer GPUs: as much of each degree as divides them, first of TP, which shapes the products."""
    if gpus == work.world_size:
        return work
    tensor = gcd(work.tensor_parallel, gpus)
    context = gcd(work.context_parallel, gpus // tensor)
    pipeline = gcd(work.pipeline_parallel, gpus // (tensor * context))
    data = gpus // (tensor * context * pipeline)
    micro_batches = min(max(1, work.accumulation), max(MICRO_BATCHES, 4 * pipeline))
    return replace(
        work,
        tensor_parallel=tensor,
        context_parallel=context,
        pipeline_parallel=pipeline,
        virtual_pipeline=work.virtual_pipeline if pipeline > 1 else None,
        expert_parallel=gcd(work.expert_parallel, gpus // pipeline),
        data_parallel=data,
        weights_split_over=min(work.weights_split_over, data),
        global_batch_sequences=work.micro_batch * data * micro_batches,
    )


def _model(shape: ModelShape, layers: int) -> dict[str, str]:
    config = load_config()
    if layers == shape.layers:
        return {"model": next((name for name, one in config.models.items() if one.architecture == shape.name), shape.name)}
    cut = asdict(replace(shape, name=f"{shape.name}-{layers}-layers", layers=layers, source=None))
    usual = {one.name: one.default for one in fields(ModelShape)}
    own = {key: value for key, value in cut.items() if value != usual[key]}
    section = {"name": cut["name"], "in_all": False, "architecture": own, **presets_of(config, shape.name)}
    name = cut["name"].replace(".", "-")
    return {"model": name, f"models.{name}": json.dumps(section)}


def _workload(work: FullWorkload, platform: PlatformName, *, elsewhere: bool) -> dict[str, str]:
    keys = f"platform_optimizations.{platform}."
    values = {
        "steps": "20",
        "precision": work.format,
        "micro_batch_size": str(work.micro_batch),
        "global_batch_size": str(work.global_batch_sequences),
        "sequence_length": str(work.sequence_tokens),
        f"{keys}recompute": work.recompute,
    }
    if platform == "nvidia" and work.fp8_scaling == "current" and (elsewhere or is_installed("transformer_engine")):
        values |= {f"{keys}engine_options.layers": "transformer_engine", f"{keys}engine_options.fp8_scaling": "current"}
    replicas_alone = work.data_parallel == work.world_size > 1
    if work.weights_split_over > 1 and replicas_alone and not work.narrow and not work.shape.experts:
        values[f"{keys}engine_options.fully_shard"] = "true"
    return values
