#!/usr/bin/env python3
"""Make a benchmark file from a training log: Primus, Megatron-LM and Bridge, NeMo, torchtitan and others.

./extract_primus_metrics.py --log-file training_llama.log --model-name llama --gpu MI300X
./extract_primus_metrics.py --log-file train.log.gz --model-name qwen --num-gpus 8 --global-batch-size 128 --sequence-length 2048
kubectl logs job/train | ./extract_primus_metrics.py --log-file - --model-name llama --gpu "NVIDIA H200"
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from tprimat.cli.start import script

if __name__ == "__main__":
    sys.exit(script("extract", "extract_primus_metrics.py"))
