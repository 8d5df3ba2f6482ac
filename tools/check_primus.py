#!/usr/bin/env python3
"""Feed every experiment file that we generate to the parser of a Primus checkout. Needs no GPU and no torch.

tools/check_primus.py /path/to/Primus
tools/check_primus.py /path/to/Primus --lr=1e-05    check further overrides as well

Exit status: 0 if Primus knows every key and reads its value and type unchanged, 1 if not, 2 if there is no Primus.
"""

import argparse
import contextlib
import io
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tprimat.config.load import Setting, read_config  # noqa: E402
from tprimat.engines.primus import ENGINE, MODULE, experiment  # noqa: E402
from tprimat.plan.build import PlanRequest, build_plan  # noqa: E402
from tprimat.plan.megatron_names import parser_arguments  # noqa: E402
from tprimat.plan.schema import PrimusStart, RunPlan  # noqa: E402

AMD = ("platform_optimizations", "amd")
VARIANTS: Mapping[str, Mapping[tuple[str, ...], Any]] = {
    "as configured": {},
    "forced balance": {("training", "routing"): "balanced"},
    "fp8, full recompute": {(*AMD, "precision"): "fp8", (*AMD, "recompute"): "full"},
    "selective recompute, small rates": {
        (*AMD, "recompute"): "selective",
        ("training", "optimizer", "learning_rate"): 1e-5,
        ("training", "optimizer", "min_learning_rate"): 0,
        ("training", "optimizer", "schedule"): "constant",
    },
}
INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}


def main() -> int:
    """Print complaints, and the number of experiments checked."""
    parser = argparse.ArgumentParser(description="Check our Primus settings against a Primus checkout.", allow_abbrev=False)
    parser.add_argument("checkout", type=Path)
    arguments, further = parser.parse_known_args()
    readers = list(find_readers(arguments.checkout.resolve()))
    if not readers:
        print(f"error: {arguments.checkout} holds no Primus parser.", file=sys.stderr)
        return 2
    checked = 0
    wrong: dict[str, list[str]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):  # Primus prints
        for name, plan in plans(Path(folder)):
            for reader in readers:
                checked += 1
                for text in complaints(reader, plan, further):
                    wrong[f"{reader.name}: {text}"].append(name)
    for text, names in wrong.items():
        print(f"{text}\n    in {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else ""))
    print(f"{checked} experiments read by {' and '.join(reader.name for reader in readers)}: {len(wrong)} complaints")
    return 1 if wrong else 0


def plans(folder: Path) -> Iterator[tuple[str, RunPlan]]:
    """Plan every model under every strategy in every variant, and one interleaved pipeline for each model."""
    plain = read_config(environment={}).config
    for model in plain.models:
        for strategy in plain.parallelism:
            for variant, changes in VARIANTS.items():
                yield f"{model} {strategy} ({variant})", plan_of(folder, model, strategy, changes)
        changed = {("parallelism", "balanced", model, "amd"): INTERLEAVED}
        yield f"{model} interleaved", plan_of(folder, model, "balanced", changed)


def plan_of(folder: Path, model: str, strategy: str, changes: Mapping[tuple[str, ...], Any]) -> RunPlan:
    """Build a plan for eight GPUs."""
    loaded = read_config(settings=[Setting(path, value, "the check") for path, value in changes.items()], environment={})
    options = loaded.config.platform_optimizations["amd"].primus
    request = PlanRequest(
        model=model,
        strategy=strategy,
        platform="amd",
        size="full",
        engine="primus",
        engine_reason="checked",
        gpus_found=8,
        run_id=f"{model}-{strategy}",
        run_directory=str(folder / "run"),
        output_directory=str(folder),
        primus=PrimusStart(program="primus-cli", overrides=options.overrides),
    )
    return build_plan(loaded, request)


class Reader:
    """One of Primus's parsers, which merge presets, experiment and command line."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        sys.path.insert(0, str(root))

    def merged(self, file: Path, words: Sequence[str]) -> dict[str, Any]:
        """Return the parameters that a run would get."""
        raise NotImplementedError

    def keys_of(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the command line as Primus reads it."""
        raise NotImplementedError


class Core(Reader):
    """primus/core, the default runtime since v26.2."""

    def merged(self, file: Path, words: Sequence[str]) -> dict[str, Any]:
        """Merge presets, experiment and command line."""
        from primus.core.config.merge_utils import deep_merge
        from primus.core.config.primus_config import get_module_config, load_primus_config
        from primus.core.utils.yaml_utils import nested_namespace_to_dict

        module = get_module_config(load_primus_config(file, None), MODULE)
        return dict(deep_merge(nested_namespace_to_dict(module.params), self.keys_of(words)))

    def keys_of(self, words: Sequence[str]) -> dict[str, Any]:
        """Return key -> value of its command line."""
        from primus.core.utils.arg_utils import parse_cli_overrides

        return dict(parse_cli_overrides(list(words)))


class Legacy(Reader):
    """primus/core/launcher, the only parser before v0.6.0."""

    def merged(self, file: Path, words: Sequence[str]) -> dict[str, Any]:
        """Merge presets, experiment and command line."""
        from primus.core.launcher.parser import load_primus_config

        loaded = load_primus_config(SimpleNamespace(config=str(file), exp=str(file)), list(words))
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        return dict(vars(config.get_module_config(MODULE)))

    def keys_of(self, words: Sequence[str]) -> dict[str, Any]:
        """Return key -> value of its command line."""
        from primus.core.launcher import parser

        return dict(parser._parse_kv_overrides(list(words)))


def find_readers(root: Path) -> Iterator[Reader]:
    """Find the parsers of a checkout."""
    if (root / "primus/core/config/primus_config.py").is_file() and (root / "primus/core/utils/arg_utils.py").is_file():
        yield Core("the core runtime", root)
    parser = root / "primus/core/launcher/parser.py"
    if parser.is_file() and "def _parse_kv_overrides" in parser.read_text(encoding="utf8"):
        yield Legacy("the legacy launcher", root)


INSTEAD: Mapping[str, str] = {
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size in the strategy of parallelism",
    "data_parallel_size": "--gpus; the data-parallel degree is what is left over",
    "world_size": "--gpus",
    "padded_vocab_size": "make_vocab_size_divisible_by",
    "consumed_train_samples": "nothing; a benchmark starts at its first step",
}
"""Keys that Megatron's validate_args always overwrites -> what to set instead."""


def complaints(reader: Reader, plan: RunPlan, further: Sequence[str]) -> Iterator[str]:
    """Name each setting that would not reach a run of this plan unchanged."""
    folder = Path(plan.run_directory)
    folder.mkdir(exist_ok=True)
    ours, bare = folder / "primus.yaml", folder / "bare.yaml"
    command = ENGINE.command(plan)
    ours.write_text(command.files[str(ours)], encoding="utf8")
    document = yaml.safe_load(ours.read_text(encoding="utf8"))
    written = document["modules"][MODULE].pop("overrides")
    bare.write_text(yaml.safe_dump(document), encoding="utf8")
    presets = reader.merged(bare, [])
    given = {**written, **reader.keys_of(further)}
    yield from (f"{key} is no key of Primus" for key in given if key not in presets)
    yield from (f"{key} is read and has no effect; use {INSTEAD[key]}" for key in given if key in INSTEAD)
    yield from (f"{key} is the text {value!r}, not a number" for key, value in given.items() if is_number_as_text(value))
    try:
        arrived = reader.merged(ours, [])
    except Exception as error:  # noqa: BLE001 - Primus raises bare ones
        yield f"Primus refuses the experiment: {error}"
        return
    intended = {**experiment(plan)["modules"][MODULE]["overrides"], **parser_arguments(plan)}  # type: ignore[index]
    for key, value in intended.items():
        if key in presets and not same(arrived.get(key), value):
            yield f"{key} is {value!r} and arrives as {arrived.get(key)!r}"


def same(left: Any, right: Any) -> bool:
    """Compare value and type: 1 is not 1.0, and true is not 1."""
    return type(left) is type(right) and left == right


def is_number_as_text(value: Any) -> bool:
    """Find numbers that Primus's parser, like YAML's, reads as text, such as 1e-05 without a dot."""
    try:
        return isinstance(value, str) and bool(value.strip()) and float(value) is not None
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main())
