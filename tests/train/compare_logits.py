"""Started in tests as a single process: the engine's GPTModel and a reference with the same weights; prints a line each.

python tests/train/compare_logits.py PLAN.json ...
"""

import json
import os
import sys
from pathlib import Path

from tprimat.megatron import bootstrap

bootstrap.redirect_to_cpu()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from reference_models import ReferenceModel  # noqa: E402

from tprimat.megatron.model import build_chunks, transformer_config  # noqa: E402
from tprimat.megatron.module import initialize_parallel_state  # noqa: E402
from tprimat.megatron.training import resolve  # noqa: E402
from tprimat.plan.schema import read_plan  # noqa: E402


def compare(plan):
    """Print the largest logit and the largest difference between both implementations."""
    options = resolve(plan, torch.device("cpu"))
    device = torch.device("cpu")
    (model,) = build_chunks(plan, transformer_config(plan, device, options), options, device)
    generator = torch.Generator().manual_seed(7)
    weights = dict(model.named_parameters())
    if plan.workload.shape.router_bias:  # else the bias of the choice is zero
        weights |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")}
    with torch.no_grad():  # norms and biases away from one and zero, so that a missing one shows
        for parameter in weights.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    tokens = torch.randint(0, plan.workload.shape.vocabulary, (2, plan.workload.sequence_tokens), generator=generator)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        ours = model.eval()(tokens, positions, None)
        theirs = ReferenceModel(plan.workload.shape, weights)(tokens)
    print(json.dumps({"difference": (ours - theirs).abs().max().item(), "largest": theirs.abs().max().item()}))


if __name__ == "__main__":
    torch.use_deterministic_algorithms(mode=True)  # fills memory that nobody has written with NaN
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    plans = [read_plan(Path(path)) for path in sys.argv[1:]]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize_parallel_state(plans[0])
    for plan in plans:
        compare(plan)
