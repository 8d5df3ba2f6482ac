"""A small configuration, and the ways to make it wrong."""

from plans import request_of

from tprimat.config.load import read_config
from tprimat.core.errors import UserError
from tprimat.runner.session import plan_run

SHAPE = "name: m, layers: 4, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, ffn: 128, vocabulary: 512, context_tokens: 256"
TEXT = f"""\
hardware:
  platforms:
    cpu: {{gpus_per_node: 4}}
models:
  mine:
    name: Mine
    architecture:
      {{{SHAPE}}}
training:
  data: {{global_batch_size: 8, sequence_length: 64}}
  routing: natural
parallelism:
  split:
    mine:
      cpu: {{tensor_model_parallel_size: 2}}
"""


def written(folder, text=TEXT):
    path = folder / "my.yaml"
    path.write_text(text, encoding="utf8")
    return path


def planned(path, *, settings=(), size="full", platform="cpu", strategy="split", model="mine", gpus=None, environment=None):
    loaded = read_config(path, size=size, settings=settings, environment=environment or {})
    return plan_run(loaded, request_of(model, strategy, platform=platform, size=size, gpus_found=gpus))


def complaint(*arguments, **choices):
    """The error text as the command line prints it."""
    try:
        planned(*arguments, **choices)
    except UserError as error:
        return str(error)
    raise AssertionError("nothing was wrong")
