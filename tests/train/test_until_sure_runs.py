"""compare.py --until-sure trains for real: two micro-batch sizes on a CPU, run in turn until one is shown to be faster."""

import json
from pathlib import Path

from commands import run_command
from planning import make_plan, train_together

from tprimat.records.environment import processor_name
from tprimat.records.schema import Machine
from tprimat.records.store import RunDirectory
from tprimat.runner import run as training

COMMON = {
    "hardware.platforms.cpu.gpus_per_node": 1,
    "training.duration.max_steps": 12,
    "training.data.global_batch_size": 8,
    "training.data.sequence_length": 32,
    "training.data.dataset": "mock",
}
SIZE = "parallelism.minimal_communication.llama.cpu.micro_batch_size"


def test_undecided_configurations_are_run_again_in_turn_until_the_verdict_is_clear(tmp_path):
    sizes = {"a1": 1, "b1": 8, "a2": 1, "b2": 8}
    plans = [make_plan(tmp_path / "runs" / name, "llama", COMMON | {SIZE: size}, layers=2) for name, size in sizes.items()]
    for plan in plans:  # as a launcher does
        machine = Machine(platform="cpu", accelerator=processor_name(), gpus_per_node=1, nodes=1)
        RunDirectory(Path(plan.run_directory)).write_run(training._starting(plan, machine, ()))
    train_together(plans)
    done = run_command("compare.py", "--results-dir", tmp_path, "--until-sure", "3", "--output", tmp_path / "c.json")
    assert done.returncode == 0, done.stderr
    runs = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("2*/run.json")]
    runs.sort(key=lambda run: run["started_at"])
    assert [(run["outcome"], run["micro_batch_sequences"]) for run in runs] == [("completed", 1), ("completed", 8)]
    document = json.loads((tmp_path / "c.json").read_text())
    (verdict,) = document["verdicts"]
    assert [len(group["runs"]) for group in document["groups"]] == [3, 3]
    assert verdict["question"]["confidence"] == 0.975
    # Other work on this machine may leave an interval too wide to say anything.
    assert "98 % interval" in verdict["words"] or "too few steps or runs for an interval" in verdict["words"]
    assert "Intervals of leads and ratios are of 97.5 %" in done.stdout
