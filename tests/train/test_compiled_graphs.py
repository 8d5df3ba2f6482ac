"""A record tells a warm compile cache from a cold one."""

import json
import os
import subprocess
import sys

from planning import LIGHTLY

SCRIPT = """
import json, os, torch
from tprimat.megatron.compat import compiled, compiled_graphs
for _ in range(2):
    child = os.fork()  # a process of its own for each, after one import
    if child == 0:
        before = compiled_graphs()
        compiled(lambda x: x.sin() * 2 + 1)(torch.ones(64))
        print(json.dumps([before, compiled_graphs()]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        # Other tests' redirection of Megatron's CUDA calls switches compiling off for the whole process.
        "TORCHDYNAMO_DISABLE": "0",
        "OMP_NUM_THREADS": "1",
        # One small graph: compiling for vector units, and torch's headers ahead of it, takes longer than the graph itself.
        "TORCHINDUCTOR_VEC_ISA_OK": "0",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }
    done = subprocess.run([sys.executable, "-c", LIGHTLY + SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[[0, 0], [1, 0]], [[0, 0], [0, 1]]]
