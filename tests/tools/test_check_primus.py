"""tools/check_primus.py with a fake parser that reads like Primus's core runtime."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "engines"))

from test_primus import plan_of  # noqa: E402

from tprimat.engines.primus import MODULE, experiment  # noqa: E402

PRIMUS_CONFIG = """
from types import SimpleNamespace
import yaml
PRESETS = {presets}

def load_primus_config(path, arguments):
    return yaml.safe_load(open(path))

def get_module_config(config, name):
    return SimpleNamespace(params={{**PRESETS, **config["modules"][name].get("overrides", {{}})}})
"""
MODULES = {
    "config/merge_utils.py": "def deep_merge(base, over):\n    return {**base, **over}\n",
    "utils/yaml_utils.py": "def nested_namespace_to_dict(params):\n    return params\n",
    "utils/arg_utils.py": (
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\nfrom fake_primus import value_of\n"
        "def parse_cli_overrides(words):\n"
        "    words = [part for word in words for part in word.split('=', 1)]\n"
        "    return {key.lstrip('-'): value_of(value) for key, value in zip(words[::2], words[1::2])}\n"
    ),
}


@pytest.fixture
def check(tmp_path):
    """Run the check against a parser that knows our keys, and Megatron's ineffective one, except those left out."""

    def run(*words, without=()):
        plans = (
            plan_of("llama", "balanced"),
            plan_of("qwen3_moe", "balanced"),
            plan_of("qwen3_moe", "balanced", "training.routing=balanced"),
        )
        known = {key: None for plan in plans for key in experiment(plan)["modules"][MODULE]["overrides"]}
        known |= {"virtual_pipeline_model_parallel_size": None}
        presets = {key: None for key in known if key not in without}
        files = {**MODULES, "config/primus_config.py": PRIMUS_CONFIG.format(presets=presets)}
        for name, text in files.items():
            path = tmp_path / "primus" / "core" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        argv = [sys.executable, str(ROOT / "tools" / "check_primus.py"), str(tmp_path), *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)

    return run


def test_every_experiment_of_ours_arrives_unchanged_and_an_override_that_primus_would_lose_is_found(check):
    done = check()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "84 experiments read by the core runtime: 0 complaints\n"
    done = check("--lr=1e-05", "--virtual_pipeline_model_parallel_size=2", "--tensor_model_paralel_size=2")
    assert done.returncode == 1
    assert "lr is the text '1e-05', not a number\n    in llama maximum_performance (as configured) and 83 more" in done.stdout
    assert "virtual_pipeline_model_parallel_size is read and has no effect" in done.stdout
    assert "tensor_model_paralel_size is no key of Primus" in done.stdout
    assert "3 complaints" in done.stdout
