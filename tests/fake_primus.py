"""A Primus checkout that trains nothing. It reads its experiment as Primus does, and prints alike.

make_checkout(FOLDER) writes one, in the form of v26.5.1 or of one before v0.5.0; make_machine(FOLDER)
also the GPUs. $FAKE_PRIMUS says what it does, in words:

once            each iteration line once, as primus-cli shows it (default)
key=value       what runs, whatever was asked for, such as tensor_model_parallel_size=1
no-dump         the arguments are not printed
oom             rank 3 is out of memory after two iterations; only its own error.log says so
nan             Megatron stops at a loss that is no number
hang            silence after four iterations
killed          a rank is killed from outside, as torchrun reports it

The lines are constructed: their wording is that of Primus's format code, their numbers are invented.
"""

import json
import os
import sys
import time
from pathlib import Path

import yaml

MILLISECONDS = 10_000.0
"""Of an iteration, as printed; a real machine takes no less."""
COLORED = "[\x1b[32m20261121 07:39:10\x1b[0m][\x1b[36mrank-{rank}/{world}\x1b[0m]\x1b[34m\x1b[1m[{level}]\x1b[0m : {text}\x1b[0m"


CARD = {
    "asic": {"market_name": "AMD Instinct MI300X OAM"},
    "vram": {"size": {"value": 196592, "unit": "MB"}},
    "driver": {"version": "6.10.5"},
}
AMD_SMI = {"gpu_data": [{"gpu": index, **CARD} for index in range(8)]}


def make_machine(root):
    """A machine with eight AMD GPUs and Primus, played by programs on PATH. Returns: the variables that say so."""
    (root / "bin").mkdir()
    for name, text in (("amd-smi", f"cat <<'END'\n{json.dumps(AMD_SMI)}\nEND\n"), ("srun", "exit 0\n")):
        (root / "bin" / name).write_text("#!/bin/sh\n" + text)
        (root / "bin" / name).chmod(0o755)
    return {
        "PATH": f"{root / 'bin'}:/usr/bin:/bin",
        "PYTHONPATH": str(Path(__file__).parent / "fake_packages"),  # whose pynvml finds no driver
        "PRIMUS_PATH": str(make_checkout(root / "Primus")),
    }


def make_checkout(root, *, modes=True):
    """A folder that looks like Primus: with primus-cli and its modes since v0.5.0, without them before."""
    for name in ("runner", "primus"):
        (root / name).mkdir(parents=True)
    start = f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport fake_primus\n"
    programs = {"primus-cli": "cli", "runner/primus-cli-direct.sh": "cli"} if modes else {"runner/primus-cli": "cli"}
    for name, function in programs.items():
        (root / name).write_text(f"{start}sys.exit(fake_primus.{function}(sys.argv[1:]))\n")
        (root / name).chmod(0o755)
    return root


def cli(words):
    """primus-cli direct ... -- train pretrain --config FILE"""
    at = words.index("train")
    if words[0] != "direct" or words[at - 1 : at + 2] != ["--", "train", "pretrain"]:
        return 2
    Path(words[words.index("--log_file") + 1]).write_text("the console once more\n")
    return train(words[words.index("--config") + 1])


def train(file):
    """Everything after the launcher."""
    acts = (os.environ.get("FAKE_PRIMUS") or "once").split()
    document = yaml.safe_load(Path(file).read_text())
    asked = document["modules"]["pre_trainer"]["overrides"]
    asked.update((key, value_of(value)) for key, _, value in (act.partition("=") for act in acts) if value)
    world = int(os.environ["NNODES"]) * int(os.environ["GPUS_PER_NODE"])
    folders = (document[key] for key in ("workspace", "work_group", "user_name", "exp_name"))
    run = Run(asked, world, Path(*folders) / "logs" / "pre_trainer", acts)
    if "no-dump" not in acts:
        run.dump()
    return run.iterate()


def value_of(text):
    """As Primus's core runtime reads a word."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    kind = float if "." in text else int
    try:
        return kind(text)
    except ValueError:
        return text


class Run:
    """The console of one training."""

    def __init__(self, asked, world, logs, acts):
        self.asked, self.world, self.logs, self.acts = asked, world, logs, acts

    def say(self, rank, text, level="INFO"):
        print(COLORED.format(rank=rank, world=self.world, level=level, text=text), flush=True)

    def dump(self):
        """Primus's rows of its module, then Megatron's arguments, all on rank 0."""
        for key, value in sorted(self.asked.items()):
            self.say(0, f"  {key:<40}: {value} ({type(value).__name__})")
        tensor, pipeline = (self.asked[f"{kind}_model_parallel_size"] for kind in ("tensor", "pipeline"))
        replicas = self.world // (tensor * pipeline)
        self.say(
            0,
            f"using world size: {self.world}, data-parallel size: {replicas}, context-parallel size: 1, hierarchical "
            f"context-parallel sizes: None, tensor-model-parallel size: {tensor}, pipeline-model-parallel size: {pipeline}",
        )
        for key, value in sorted(self.asked.items()):
            self.say(0, f"  {key} {'.' * (46 - len(key))} {value}")

    def iterate(self):
        """Until the end, or until what was asked for goes wrong."""
        for number in range(1, self.asked["train_iters"] + 1):
            self.line(number)
            if number == 2 and "oom" in self.acts:
                return self.out_of_memory()
            if number == 3 and "nan" in self.acts:
                return self.not_a_number()
            if number == 3 and "killed" in self.acts:
                return self.killed()
            if number == 4 and "hang" in self.acts:
                time.sleep(600)
        self.say(0, "[after training is done] datetime: 2026-11-21 07:40:10")
        return 0

    def line(self, number):
        """The last rank's, a debug message; on one node rank 0 may repeat it under the last one's name."""
        batch, length = self.asked["global_batch_size"], self.asked["seq_length"]
        rate = batch * length / (MILLISECONDS * 1e-3) / self.world
        averaged = number > self.asked["log_avg_skip_iterations"]
        elapsed = f"{MILLISECONDS}/{MILLISECONDS}" if averaged else f"{MILLISECONDS}"
        tokens = f"tokens/s/GPU inst/harmonic mean: {rate:.1f}/{rate:.1f} | " if averaged else ""
        text = (
            f"[2026-11-21 07:39:11.165432] iteration {number:8d}/{self.asked['train_iters']:8d} | consumed samples: "
            f"{number * batch:12d} | elapsed time per iteration (ms): {elapsed} | {tokens}learning rate: 1.000000E-05 | "
            f"global batch size: {batch:5d} | lm loss: {11.9 - 0.1 * number:.6E} | loss scale: 1.0 | grad norm: 7.412 | "
            "number of skipped iterations:   0 | number of nan iterations:   0 | hip mem usage/free/total/usage_ratio: "
            "117.98GB/74.00GB/191.98GB/61.45%"
        )
        self.say(self.world - 1, text, "DEBUG")

    def rank_says(self, rank, text):
        folder = self.logs / f"rank-{rank}"
        folder.mkdir(parents=True)
        (folder / "error.log").write_text(f"[20261121 07:40:00][rank-{rank}/{self.world}][ERROR] : {text}\n")

    def out_of_memory(self):
        self.rank_says(
            3,
            "Traceback (most recent call last):\ntorch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.31 GiB. "
            "GPU 3 has a total capacity of 191.98 GiB of which 780.24 MiB is free.",
        )
        return self.torchrun_reports(3, "exitcode  : 1 (pid: 4242)")

    def not_a_number(self):
        text = "Unexpected result nan (message='found NaN in local forward loss calculation')"
        self.say(0, f"RuntimeError: Rank 0, node n0, device 0, iteration 3: {text}", "ERROR")
        return self.torchrun_reports(0, "exitcode  : 1 (pid: 4242)")

    def killed(self):
        return self.torchrun_reports(5, "exitcode  : -9 (pid: 4242) (SIGKILL)")

    def torchrun_reports(self, rank, how):
        print("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:")
        print(f"Root Cause (first observed failure):\n[0]:\n  rank      : {rank} (local_rank: {rank})\n  {how}", flush=True)
        return 1
