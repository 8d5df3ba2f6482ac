"""A record tells a warm compile cache from a cold one."""

import json
import os
import subprocess
import sys

SCRIPT = """
import json, torch
from tprimat.megatron.compilation import compiled, compiled_graphs
before = compiled_graphs()
compiled(lambda x: x.sin() * 2 + 1)(torch.ones(64))
print(json.dumps([before, compiled_graphs()]))
"""


def graphs(cache):
    # Other tests' redirection of Megatron's CUDA calls switches compiling off for the whole process.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHDYNAMO_DISABLE": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    assert graphs(tmp_path) == [[0, 0], [1, 0]]
    assert graphs(tmp_path) == [[0, 0], [0, 1]]
