"""Memory and time of a training run, predicted before it: pure functions of a workload and, where there are some, of probes."""

from typing import NamedTuple

from tprimat.core.accelerators import Accelerator
from tprimat.core.workload import FullWorkload
from tprimat.predict.memory import MemoryPrediction, predict_memory
from tprimat.predict.rates import published_rates
from tprimat.predict.time import TimePrediction, predict_time


class Prediction(NamedTuple):
    """What one step of a workload takes."""

    memory: MemoryPrediction
    time: TimePrediction


def predict(workload: FullWorkload, accelerator: Accelerator, gpus_per_node: int | None = None) -> Prediction:
    """Return the memory and the time of a step by published figures; nodes are the vendor's unless their size is given."""
    rates = published_rates(accelerator, gpus_per_node or accelerator.node_gpus)
    return Prediction(predict_memory(workload), predict_time(workload, rates))
