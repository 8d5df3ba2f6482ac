"""All that a rank of the embedded engine imports, for a process whose forks are ranks."""

import os
import time

from tprimat.megatron import bootstrap
from tprimat.records import environment, schema, store
from tprimat.train import startup

startup.pause_garbage_collection()
startup.import_torchmetrics()
bootstrap.offer_wgrad_extension()
redirected = bootstrap.redirect_to_cpu()

from freezing import FreezingRecorder  # noqa: E402
from repeating import CollectiveExchange, dropped_in_time  # noqa: E402

from tprimat.megatron import graphs, linear, module, training  # noqa: E402
from tprimat.plan.graphs import launches_graphs  # noqa: E402

module.CudaRecorder, linear.exchange_of = FreezingRecorder, CollectiveExchange  # what a CPU lacks

environment.software_versions()
store.adapter(schema.RunRecord)
startup.resume_garbage_collection()  # so that no rank searches what was imported, and copies its pages


begin_step = graphs.StageGraphs.begin_step


def begin_step_as_on_a_gpu(stage):
    begin_step(stage)
    if stage.recorded:  # before, gloo may still read an output
        stage._forward_pass.__self__.config.deallocate_pipeline_outputs = True


graphs.StageGraphs.begin_step = begin_step_as_on_a_gpu

LATE_SECONDS = 0.2
"""By which rank 1 is late in each micro-batch of a plan that says so in its name."""


def train(plan):
    training.can_overlap = lambda ranks, gpus: plan.engine_options.overlap_tensor_parallel is True  # a CPU never can
    if "late-rank" in plan.run_id and os.environ["RANK"] == "1":
        module.MegatronModule._losses_of = late(module.MegatronModule._losses_of)
    training.fit(plan, redirected)
    # NCCL waits for the graphs that hold its kernels.
    recorded = launches_graphs(plan) and plan.steps > graphs.STEPS_BEFORE
    assert not recorded or (dropped_in_time and all(dropped_in_time)), "the graphs outlive the groups of ranks"


def late(compute):
    def compute_late(*arguments):
        losses = compute(*arguments)
        time.sleep(LATE_SECONDS)
        return losses

    return compute_late
