"""Started in tests as the only rank: trains a plan whose data end in a step, in its middle unless CUDA graphs launch it.

python tests/train/fails_in_a_step.py PLAN.json STEP, with what torchrun sets in the environment
"""

import sys
from pathlib import Path

from tprimat.megatron import bootstrap
from tprimat.train import startup

startup.import_torchmetrics()
redirected = bootstrap.redirect_to_cpu()

from repeating import RepeatingRecorder  # noqa: E402

from tprimat.megatron.module import MegatronModule  # noqa: E402
from tprimat.megatron.training import fit  # noqa: E402
from tprimat.plan.schema import read_plan  # noqa: E402


class Failing(MegatronModule):
    def _forward(self, batches, model):
        self.fail_in_time()
        return super()._forward(batches, model)

    def _launch_graphs(self, graphs, batch):
        self.fail_in_time()
        return super()._launch_graphs(graphs, batch)

    def fail_in_time(self):
        if self.trainer.global_step + 1 == int(sys.argv[2]):
            raise ValueError("the data have come to an end")


if __name__ == "__main__":
    sys.modules["tprimat.megatron.training"].MegatronModule = Failing
    sys.modules["tprimat.megatron.module"].CudaRecorder = RepeatingRecorder
    fit(read_plan(Path(sys.argv[1])), redirected)
