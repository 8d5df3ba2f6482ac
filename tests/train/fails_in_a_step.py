"""Started in tests as the only rank: trains a plan whose data end in the middle of a step that is profiled.

python tests/train/fails_in_a_step.py PLAN.json STEP, with what torchrun sets in the environment
"""

import sys
from pathlib import Path

from tprimat.megatron import bootstrap
from tprimat.train import startup

startup.import_torchmetrics()
redirected = bootstrap.redirect_to_cpu()

from tprimat.megatron.module import MegatronModule  # noqa: E402
from tprimat.megatron.training import fit  # noqa: E402
from tprimat.plan.schema import read_plan  # noqa: E402


class Failing(MegatronModule):
    def _forward(self, batches, model):
        if self.trainer.global_step + 1 == int(sys.argv[2]):
            raise ValueError("the data have come to an end")
        return super()._forward(batches, model)


if __name__ == "__main__":
    sys.modules["tprimat.megatron.training"].MegatronModule = Failing
    fit(read_plan(Path(sys.argv[1])), redirected)
