"""The commands and experiments that start Primus. `python tests/engines/test_primus.py` writes the golden files anew."""

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))

from fake_primus import make_checkout  # noqa: E402
from plans import request_of  # noqa: E402

from tprimat.config.load import parse_setting, read_config  # noqa: E402
from tprimat.config.schema import PrimusOptions  # noqa: E402
from tprimat.core.errors import LaunchError  # noqa: E402
from tprimat.engines.primus import ENGINE, find_installation  # noqa: E402
from tprimat.plan.build import build_plan  # noqa: E402
from tprimat.plan.schema import PrimusStart  # noqa: E402

GOLDEN = Path(__file__).parent / "golden" / "primus"
WORKLOAD = (
    "training.data={micro_batch_size: 1, global_batch_size: 128, sequence_length: 2048}",
    "training.optimizer={learning_rate: 3.0e-4, min_learning_rate: 3.0e-5, warmup_steps: 10, weight_decay: 0.1}",
    "training.duration.max_steps=50",
)
"""Fixed here, so that another default in config.yaml is no other golden file."""
DIRECT = PrimusStart(program="/opt/Primus/primus-cli", directory="/opt/Primus")


def plan_of(model="llama", strategy="truly_identical", *changes, start=DIRECT, **fields):
    loaded = read_config(settings=[parse_setting(change) for change in (*WORKLOAD, *changes)], environment={})
    additional = loaded.config.platform_optimizations["amd"].primus.overrides
    start = dataclasses.replace(start, overrides=additional)
    run = f"a-run-{model}-{strategy}"
    given = {"platform": "amd", "engine": "primus", "engine_reason": "asked for", "primus": start}
    given |= {"run_id": run, "run_directory": f"/results/runs/{run}", "output_directory": "/results"}
    return build_plan(loaded, request_of(model, strategy, **{**given, **fields}))


def golden_plans():
    for model, strategy in (("llama", "truly_identical"), ("qwen", "maximum_performance")):
        yield f"{model}-{strategy}", plan_of(model, strategy)
    own = "platform_optimizations.amd"
    yield (
        "llama-fp8",
        plan_of("llama", "balanced", f"{own}.precision=fp8", f"{own}.recompute=full", f"{own}.environment={{A: B}}"),
    )


def as_text(plan):
    """A command as a person would type it, and the files that it needs."""
    command = ENGINE.command(plan)
    variables = [f"{name}={shlex.quote(value)}" for name, value in command.environment.items()]
    words = " \\\n  ".join([f"cd {command.directory} &&", *variables, shlex.join(command.argv).replace(" --", " \\\n  --")])
    return words + "\n" + "".join(f"\n== {name}\n{text}" for name, text in command.files.items())


PLANS = dict(golden_plans())


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_becomes_the_same_command_and_experiment_as_ever(name):
    assert as_text(PLANS[name]) == (GOLDEN / f"{name}.txt").read_text()


def test_a_number_is_written_so_that_primus_reads_it_back():
    (text,) = ENGINE.command(plan_of()).files.values()
    assert yaml.safe_load(text)["modules"]["pre_trainer"]["overrides"]["adam_eps"] == 1e-8


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        (["training.data.dataset=text:/a"], {}, "mock data"),
        (["profiling.enabled=true"], {}, "does not profile"),
        (
            ["platform_optimizations.amd.recompute=selective", "platform_optimizations.amd.recompute_modules=[mlp]"],
            {},
            "not told to recompute mlp",
        ),
        (["platform_optimizations.amd.primus.overrides={tensor_model_parallel_size: 2}"], {}, "decided by the plan"),
        (["models.llama.primus_config=null"], {}, "no Primus model file"),
        ([], {"size": "tiny"}, "full model only"),
        (["hardware.platforms.amd.nodes=2"], {}, "one node only"),
    ],
)
def test_what_primus_cannot_do_is_refused_before_anything_starts(changes, fields, message):
    plan = plan_of("llama", "balanced", *changes, **fields)
    error = ENGINE.refusal(plan, lambda *keys: ".".join(keys))
    assert message in error.what
    assert error.fix


def test_the_logs_of_the_ranks_lie_in_the_run_s_own_folder():
    assert ENGINE.error_logs(plan_of())[0].startswith("/results/runs/a-run-llama-truly_identical/primus/")


def test_a_checkout_is_started_by_its_cli_and_one_without_modes_is_refused(tmp_path):
    new, old = make_checkout(tmp_path / "new"), make_checkout(tmp_path / "old", modes=False)
    assert find_installation(PrimusOptions(), str(new)) == PrimusStart(program=str(new / "primus-cli"), directory=str(new))
    with pytest.raises(LaunchError, match=r"has no runner/primus-cli-direct.sh"):
        find_installation(PrimusOptions(), str(old))


def test_a_primus_cli_on_the_path_leads_to_its_checkout_or_stands_alone(tmp_path, monkeypatch):
    root = make_checkout(tmp_path / "Primus")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "primus-cli").symlink_to(root / "primus-cli")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_installation(PrimusOptions(), None).directory == str(root)
    (tmp_path / "bin" / "primus-cli").unlink()
    alone = tmp_path / "bin" / "primus-cli"
    alone.write_text("#!/bin/sh\n")
    alone.chmod(0o755)
    assert find_installation(PrimusOptions(), None) == PrimusStart(program=str(alone))


def test_a_checkout_is_known_by_its_tag_and_commit(tmp_path):
    root = make_checkout(tmp_path / "Primus")
    assert find_installation(PrimusOptions(), str(root)).version is None
    name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], [*name, "commit", "-qm", "all"], ["tag", "v26.5.1"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    installation = find_installation(PrimusOptions(), str(root))
    assert ENGINE.software(plan_of(start=installation)) == {"primus": "v26.5.1"}
    assert ENGINE.software(plan_of()) == {}


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, plan in PLANS.items():
        (GOLDEN / f"{name}.txt").write_text(as_text(plan))
