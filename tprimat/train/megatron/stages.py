"""How many layers each pipeline stage gets, so that none waits long for another."""

from tprimat.facts.matmuls import attention_matrices, feed_forward_matrices
from tprimat.facts.models import ModelShape, padded_vocabulary


def layers_of_last_stage(shape: ModelShape, stages: int) -> int:
    """Layers of the last stage with which the slowest stage has least to multiply; the other stages share the rest evenly.

    Args:
        shape: of the model; its matrices are counted, attention's products of tokens with tokens are not.
        stages: pipeline stages, 2 or more.
    """
    layer = sum(matrix.active_parameters for matrix in [*attention_matrices(shape), *feed_forward_matrices(shape)])
    output = padded_vocabulary(shape) * shape.hidden / layer
    others = stages - 1

    def slowest(last: int) -> float:
        return max(last + output, (shape.layers - last) / others)

    even = shape.layers // stages
    choices = [last for last in range(1, even + 1) if (shape.layers - last) % others == 0]
    return min(reversed(choices), key=slowest, default=even)
