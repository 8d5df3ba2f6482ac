"""Primus, AMD's training framework over Megatron: a generated experiment file and the launcher that starts it.

Sources: AMD-AGI/Primus, v0.5.0 to v26.5.1: runner/primus-cli*.sh, and the key names of
primus/configs/modules/megatron/*.yaml and primus/configs/models/megatron/*.yaml. tools/check_primus.py checks the settings with a
checkout's own parser.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path, PurePath
from typing import ClassVar

import yaml

from tprimat.core.accelerators import PlatformName
from tprimat.core.errors import ConfigError, LaunchError, UserError
from tprimat.core.implementations import TRANSFORMER_ENGINE, Implementation
from tprimat.core.rows import DATA, document
from tprimat.core.workload import ATTENTION_ALONE
from tprimat.engines.base import LIMITS, Command, Engine, Here, Where, beyond
from tprimat.logs.fields import Dialect
from tprimat.logs.formats.megatron import PRIMUS
from tprimat.plan.megatron_names import Value, parser_arguments
from tprimat.plan.schema import PrimusOptions, PrimusStart, RunPlan

WORK_GROUP, USER_NAME, MODULE = "tprimat", "benchmark", "pre_trainer"


def experiment(plan: RunPlan) -> dict[str, object]:
    """Return the whole experiment file. What the plan does not decide keeps the value of Primus's preset for the model."""
    module = {
        "framework": "megatron",
        "config": "pre_trainer.yaml",
        "model": f"{plan.primus_config}.yaml",
        "overrides": {**_decided(plan), **(plan.primus.overrides if plan.primus else {})},
    }
    return {
        "work_group": WORK_GROUP,
        "user_name": USER_NAME,
        "exp_name": plan.run_id,
        "workspace": str(PurePath(plan.run_directory) / "primus"),
        "modules": {MODULE: module},
    }


def _decided(plan: RunPlan) -> dict[str, Value]:
    return {**parser_arguments(plan), **document(DATA / "framework_settings.yaml")["primus"]}


def _refusals(plan: RunPlan, where: Where) -> Iterator[UserError]:
    modules, place = plan.workload.recompute_modules or ATTENTION_ALONE, where("models", plan.model, "primus_config")
    if plan.primus_config is None:
        yield LaunchError(f"The model {plan.model} has no Primus model file.", where=place, fix=f"{place}: llama3.1_8B")
    if modules != ATTENTION_ALONE:
        place, fix = where("platform_optimizations", plan.platform, "recompute_modules"), "recompute_modules: null"
        yield LaunchError(f"The engine primus is not told to recompute {', '.join(modules)}.", where=place, fix=fix)
    decided = _decided(plan)
    for key in plan.primus.overrides if plan.primus else ():
        place = where("platform_optimizations", plan.platform, "primus", "overrides", key)
        if key in decided:
            yield ConfigError(f"{key} is decided by the plan.", where=place, fix="the flag or the key of config.yaml")


# Where Primus is installed, and how it is started.

DIRECT = "runner/primus-cli-direct.sh"
"""Exists since v0.5.0, when primus-cli got its modes."""
CLI = ("primus-cli", "runner/primus-cli")
"""At the root since v26.2."""
GIT_TIMEOUT_SECONDS = 10.0
"""--dirty compares every file, which is slow on a network file system."""
INSTALL = "export PRIMUS_PATH=/path/to/Primus, or put primus-cli on PATH; or --engine megatron"


def find_primus(primus_path: str | None) -> str | None:
    """Return the user's Primus checkout, or the primus-cli on PATH."""
    if primus_path and Path(primus_path).is_dir():
        return primus_path
    return shutil.which("primus-cli")


def find_installation(options: PrimusOptions, primus_path: str | None) -> PrimusStart:
    """Find primus-cli in the user's checkout or on PATH, and the checkout around it."""
    place = find_primus(primus_path)
    if place is None:
        raise LaunchError("Primus was not found.", fix=INSTALL)
    start = Path(place).resolve()
    checkouts = [start] if start.is_dir() else [one for one in start.parents[:2] if (one / "runner").is_dir()]
    if not checkouts:
        return PrimusStart(program=str(Path(place).absolute()), overrides=options.overrides)
    root = checkouts[0]
    program = next((root / name for name in CLI if (root / name).is_file()), None)
    if program is None or not (root / DIRECT).is_file():
        what, why = f"The Primus at {place} has no {DIRECT}.", "primus-cli has its modes since v0.5.0."
        raise LaunchError(what, why=why, fix="PRIMUS_PATH with a newer checkout")
    return PrimusStart(program=str(program), directory=str(root), version=version_of(root), overrides=options.overrides)


def version_of(root: Path) -> str | None:
    """Return tag and commit of a checkout, such as v26.5.1-3-gfd1eeabb; None if git or its history is missing."""
    if not (root / ".git").exists():  # git would search the parent folders
        return None
    argv = ["git", "-C", str(root), "describe", "--tags", "--always", "--dirty"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=GIT_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


class PrimusEngine(Engine):
    """Starts Primus and reads its console."""

    name: ClassVar[str] = "primus"
    automatic_on: ClassVar[PlatformName | None] = "amd"
    lacks: ClassVar[frozenset[str]] = frozenset(LIMITS) - {"cpu"}
    dialect: ClassVar[Dialect | None] = PRIMUS
    layers: ClassVar[Implementation | None] = replace(TRANSFORMER_ENGINE, loss="in_place")
    """As the settings for MI300X ask."""

    def available(self, here: Here) -> str | UserError:
        """Look for the user's checkout, or for primus-cli on PATH."""
        path = here.primus_path
        if (place := find_primus(path)) is not None:
            return f"Primus is at {place}"
        what = f"There is no folder {path} (PRIMUS_PATH)." if path else "Primus was not found."
        return LaunchError(what, why="The engine primus starts AMD's Primus.", fix=INSTALL)

    def refusal(self, plan: RunPlan, where: Where) -> UserError | None:
        """Refuse what has no counterpart in Primus, and keys that contradict the plan."""
        return next(chain(beyond(self, plan, where), _refusals(plan, where)), None)

    def prepare(self, here: Here | None) -> PrimusStart:
        """Find out which Primus is installed and how to start it."""
        if here is None:
            return PrimusStart(program=DIRECT)
        return find_installation(here.primus, here.primus_path)

    def software(self, plan: RunPlan) -> dict[str, str]:
        """Return the version of the checkout."""
        return {self.name: plan.primus.version} if plan.primus and plan.primus.version else {}

    def error_logs(self, plan: RunPlan) -> tuple[str, ...]:
        """Return the pattern of all ranks' tracebacks; primus-cli hides those of most ranks from the console."""
        folder = PurePath(plan.run_directory) / "primus" / WORK_GROUP / USER_NAME / plan.run_id
        return (str(folder / "logs" / MODULE / "rank-*" / "error.log"),)

    def command(self, plan: RunPlan) -> Command:
        """Return primus-cli with the generated experiment."""
        if plan.primus is None:
            raise LaunchError("The plan does not say which Primus to start.", fix="plan again with --engine primus")
        file = str(PurePath(plan.run_directory) / "primus.yaml")
        heading = f"# The experiment of run {plan.run_id}, generated from plan.json beside it.\n"
        log = str(PurePath(plan.run_directory) / "primus.log")  # the launcher's copy of the console, by default one for all runs
        words = ("direct", "--log_file", log, "--", "train", "pretrain", "--config", file)
        # What Primus would otherwise take from its surroundings, such as an enclosing SLURM job.
        port = os.environ.get("MASTER_PORT", "29500")  # Primus's is 1234, below the ports that are free for everyone
        here = {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        here |= {"PRIMUS_EXP_NAME": plan.run_id, "GPUS_PER_NODE": str(plan.gpus_per_node)}
        return Command(
            argv=(plan.primus.program, *words),
            environment={**plan.environment, **here},
            directory=plan.primus.directory,
            # PyYAML writes every float with a dot; it would read 1e-05 back as a string.
            files={file: heading + yaml.safe_dump(experiment(plan), sort_keys=False, width=200)},
        )


ENGINE = PrimusEngine()
