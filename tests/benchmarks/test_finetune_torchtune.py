"""The torchtune runs from texts and weights to records, with a fake torchtune command."""

import json

import pytest

from benchmarks.finetune_qwen3 import weights
from benchmarks.finetune_qwen3.__main__ import main
from benchmarks.finetune_qwen3.embedded import Training
from benchmarks.finetune_qwen3.jobs import EMBEDDED, jobs, run_jobs
from benchmarks.finetune_qwen3.section import section
from tprimat.records.schema import Machine

GPUS = Machine(platform="cuda", accelerator="NVIDIA H200", gpus_per_node=2, nodes=1)
TRAINING = Training(machine=GPUS, ranks=2, steps=6, limit_seconds=None)
FAKE_TORCHTUNE = '''
"""Takes the arguments of torchtune's recipes, reads and writes the same files."""
import json, os, pathlib, sys
import yaml

words = sys.argv[sys.argv.index("--config") + 2 :]
settings = {}
for key, value in (word.split("=", 1) for word in words):
    place = settings
    *above, last = key.split(".")
    for part in above:
        place = place.setdefault(part, {})
    place[last] = yaml.safe_load(value)
assert os.environ["HF_HUB_OFFLINE"] == "1"
checkpoint = pathlib.Path(settings["checkpointer"]["checkpoint_dir"])
for name in ("config.json", *(f"model-{i:05}-of-00005.safetensors" for i in range(1, 6))):
    assert (checkpoint / name).stat().st_size, name
assert json.loads(pathlib.Path(settings["tokenizer"]["path"]).read_text())
texts = [json.loads(line) for line in pathlib.Path(settings["dataset"]["data_files"]).read_text().splitlines()]
requested = settings["max_steps_per_epoch"] * 2 * settings["batch_size"] * settings["tokenizer"]["max_seq_len"]
assert sum(30 + len((t["instruction"] + " " + t["output"]).split()) for t in texts) >= requested
folder = pathlib.Path(settings["output_dir"])
(folder / "logs").mkdir(parents=True, exist_ok=True)
pathlib.Path(settings["dataset"]["cache_dir"]).mkdir(exist_ok=True)
full = "full_finetune_distributed" in sys.argv
settings |= {"dtype": "bf16", "model": {"_component_": "torchtune.models.qwen3." + ("qwen3_8b" if full else "lora_qwen3_8b")}}
(folder / "torchtune_config.yaml").write_text(yaml.safe_dump(settings))
assert settings["save_every_n_steps"] > settings["max_steps_per_epoch"] if full else "save_every_n_steps" not in settings
for trained in ("epoch_0", "step_6"):
    (folder / trained).mkdir(exist_ok=True)
    (folder / trained / "model-00001-of-00005.safetensors").write_bytes(b"trained")
with (folder / "logs" / "log_1.txt").open("w") as log:
    for step in range(1, settings["max_steps_per_epoch"] + 1):
        memory = "peak_memory_active:90.0 peak_memory_alloc:90.5 peak_memory_reserved:95.25"
        log.write(f"Step {step} | loss:{12 - step / 10} lr:5e-06 tokens_per_second_per_gpu:{8000 + step} {memory}\\n")
'''


@pytest.fixture
def output_folder(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "torchtune"
    for folder in ("_cli", "models/qwen3"):
        (package / folder).mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_cli" / "tune.py").write_text(FAKE_TORCHTUNE)
    monkeypatch.syspath_prepend(package.parent)
    return tmp_path / "output"


def tiny_checkpoint(folder):
    assert weights.main([str(folder), "--tiny"]) == 0


def run(output, checkpoint):
    run_jobs(jobs(output, TRAINING, checkpoint, set(EMBEDDED)), output, TRAINING, None)
    return {path.parent.name: json.loads(path.read_text()) for path in output.rglob("benchmark_*.json")}


def test_random_weights_are_trained_and_every_record_says_so(output_folder):
    tiny_checkpoint(output_folder / "torchtune" / "random-checkpoint")
    documents = run(output_folder, "random")
    assert sorted(documents) == ["torchtune-full-bf16", "torchtune-full-fp8", "torchtune-lora-bf16"]
    for name, document in documents.items():
        evidence = document["run"]["evidence"]
        assert "weights: random" in evidence["notes"]
        assert ("enable_fp8_training: True" in evidence["notes"]) == name.endswith("fp8")
        seen = evidence["workload"]
        assert (seen["data"], seen["parameter_dtype"]) == ("invented instructions, packed", "bf16")
        assert seen["micro_batch_sequences"] == 14
        assert len(document["steps"]) == 6
        assert document["metrics"]["tokens_per_second_per_gpu"]["value"] == pytest.approx(8004, abs=4)
        assert document["metrics"]["mfu"] is document["metrics"]["model_flops_per_second_per_gpu"] is None
        assert seen["matmul_dtype"] is None  # neither its log nor its configuration tells what the matrix units ran
        assert document["run"]["engine_options"]["model"] == ("lora_qwen3_8b" if "lora" in name else "qwen3_8b")
    assert sorted(path.name for path in (output_folder / "qwen3-8b" / "torchtune-full-bf16").iterdir()) == [
        "benchmark_qwen3-8b.json",
        "logs",
        "torchtune_config.yaml",
    ], "16 GB of each run that nobody needs"
    assert main(["--output", str(output_folder), "--page-only"]) == 0
    assert "| torchtune-lora-bf16 |" in (output_folder / "finetune_qwen3.md").read_text()
    text = section(output_folder)
    assert "With random weights" in text
    row = next(line for line in text.splitlines() if line.startswith("| torchtune-lora-bf16"))
    assert row.endswith("| 2 | 8,004 | 16,008 | 90.5 GiB | 5 |"), "no FLOP rate: LoRA and packed texts need fewer"
    assert "FLOP" not in next(line for line in text.splitlines() if line.startswith("| run |")), "and so no column of it"
