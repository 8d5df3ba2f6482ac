"""run_all_configs.sh: five strategies into five folders. The fake trainer stands in for training."""

import json
from pathlib import Path

import pytest

from tprimat.cli import run as command
from tprimat.cli.main import start

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_pictures(monkeypatch):
    """Five pictures take longer than the rest of a test that does not look at them."""
    monkeypatch.setattr(command, "draw", lambda picture, words: True)


def run(*arguments):
    return start(
        "sweep", "run_all_configs.sh", ["--config", str(ROOT / "config.yaml"), "--platform", "cpu", "--steps", "4", *arguments]
    )


def table(text):
    return [line.split() for line in text.splitlines() if line.startswith("output-")]


def test_each_strategy_gets_its_folder_in_the_order_of_the_readme(trainer, tmp_path, capsys):
    assert run("llama") == 0
    out, err = capsys.readouterr()
    assert "llama truly_identical (output-01) is maximum_performance on cpu: run once" in err
    assert [plan.strategy for plan in trainer["started"]].count("truly_identical") == 0
    lines = table(out)
    strategies = ["maximum_performance", "truly_identical", "memory_optimized", "minimal_communication", "balanced"]
    assert [line[:3] for line in lines] == [[f"output-0{place}", "llama", name] for place, name in enumerate(strategies)]
    assert all(line[6] == "completed" and line[8].startswith("[") for line in lines), "each rate has its interval"
    assert (tmp_path / "all_outputs" / "compare-all.png").is_file()
    for number in range(5):
        assert (tmp_path / f"output-0{number}" / "benchmark_cpu_llama.json").is_file()
        assert (tmp_path / "all_outputs" / f"compare-0{number}.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / f"output-0{number}" / "training_llama.log").read_text().startswith("Using parallelism strategy: ")
    assert start("compare", "compare.py", ["--results-dir", "output-00", "output-01"]) == 0
    assert " same run " in (ranked := capsys.readouterr().out)
    assert "within noise" not in ranked, "a run is compared with itself"


def test_a_cell_that_fails_stops_no_other_is_explained_and_alone_runs_again(trainer, capsys, no_pictures):
    trainer["memory_optimized"] = ("raise", "RuntimeError", "the gears broke")
    assert run("llama") == 1
    out = capsys.readouterr().out
    assert [line[6] for line in table(out)] == ["completed", "completed", "failed", "completed", "completed"]
    assert "llama memory_optimized: RuntimeError: the gears broke" in out
    trainer["started"].clear()
    del trainer["memory_optimized"]
    assert run("llama") == 0
    assert [plan.strategy for plan in trainer["started"]] == ["memory_optimized"]
    assert [line[7] for line in table(capsys.readouterr().out)].count("earlier") == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "parallel=balanced"], "--set parallel is not for this command"),
        (["--set", "model=qwen"], "try   ./run_all_configs.sh MODEL\n"),
        (["--steps", "many"], "max_steps"),
        (["--config", "missing.yaml"], "missing.yaml"),
    ],
)
def test_a_mistake_that_concerns_all_cells_starts_nothing(trainer, capsys, arguments, said):
    assert run(*arguments) == 2
    assert said in capsys.readouterr().err
    assert not trainer["started"]


def test_on_one_rank_only_the_strategy_that_splits_nothing_can_run(trainer, capsys, no_pictures):
    assert run("llama", "--gpus", "1") == 1
    lines = table(capsys.readouterr().out)
    assert [line[4] for line in lines] == ["cannot", "cannot", "cannot", "PP1", "cannot"]
    assert lines[3][6] == "completed"
    assert [plan.strategy for plan in trainer["started"]] == ["minimal_communication"]


def test_a_model_that_a_strategy_has_no_layout_for_is_left_out_and_fails_nothing(trainer, tmp_path, capsys, no_pictures):
    text = (ROOT / "config.yaml").read_text()
    path = tmp_path / "config.yaml"
    path.write_text(text[: text.index("    qwen:\n      nvidia: &tp2_pp2")] + text[text.index("platform_optimizations:") :])
    assert run("qwen", "--config", str(path)) == 0
    out = capsys.readouterr().out
    assert len(trainer["started"]) == 2, "three of the five split Qwen alike"
    assert " ".join(table(out)[-1]) == "output-04 qwen balanced – left out –"
    assert "qwen balanced: The strategy balanced has no layout for qwen." in out


def test_a_dry_run_prints_the_plan_of_each_strategy_and_starts_nothing(trainer, tmp_path, capsys):
    assert run("llama", "--dry-run") == 0
    out = capsys.readouterr().out
    assert out.count("Using parallelism strategy: m") == 3
    assert out.count("Nothing was started or written.") == out.count(" cores") == 1
    assert run("llama", "--dry-run", "--json", "--runs", "3") == 0
    assert len(json.loads(capsys.readouterr().out)["plans"]) == 4 * 3, "one document, in which nothing is repeated"
    assert (trainer["started"], list(tmp_path.iterdir())) == ([], [])
