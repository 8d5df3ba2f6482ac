"""Record a Kineto trace of a few optimizer steps on rank 0, for TensorBoard and for Chrome's viewer.

OUTPUT/profiler/RUN_ID/rank_0.CYCLE.pt.trace.json   the names that TensorBoard's PyTorch Profiler plugin looks for
OUTPUT/profile_PLATFORM_MODEL_RUN_ID.json           the same file under a second name (a hard link)
"""

import itertools
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from tprimat.core.accelerators import BACKEND_OF
from tprimat.plan.schema import RunPlan
from tprimat.records.evidence import STEPS_WITHOUT_GRAPHS
from tprimat.records.store import cannot_write
from tprimat.train.compat import callback_bases


def profiling_callbacks(plan: RunPlan, graphs: bool = False) -> list[Any]:
    """Return the callback that a plan asks for, or none; it belongs after BenchmarkCallback, which closes a step first."""
    return [ProfilerCallback(plan, graphs)] if plan.profiling.enabled else []


class ProfilerCallback(*callback_bases()):  # type: ignore[misc]
    """Steps torch.profiler once per optimizer step."""

    def __init__(self, plan: RunPlan, graphs: bool) -> None:
        super().__init__()
        self.plan = plan
        self._graphs = graphs
        self.traces: list[Path] = []
        self._profile: profile | None = None
        self._first_step = 1
        self._last_step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the schedule on rank 0: its first step is the first step of training."""
        del pl_module
        if trainer.global_rank != 0:
            return
        self._last_step = trainer.global_step
        self._first_step = trainer.global_step + 1
        wanted = self.plan.profiling
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
            schedule=profiler_schedule(self.plan, self._graphs),
            on_trace_ready=self._save,
            record_shapes=wanted.record_shapes,
            profile_memory=wanted.profile_memory,
            with_stack=wanted.with_stack,
            with_flops=wanted.with_flops,
        )
        self._profile.start()
        self._step_began(self._profile)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Advance the schedule, if the optimizer stepped; the end of training closes the last step."""
        del pl_module, outputs, batch, batch_idx
        if self._profile is None or trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        if 0 < trainer.max_steps <= trainer.global_step:
            return
        self._profile.step()
        self._step_began(self._profile)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the trace that is still recorded."""
        del trainer, pl_module
        running, self._profile = self._profile, None
        if running is None:
            return
        running.stop()
        if not self.traces:
            when = self.plan.profiling.schedule
            first = self._first_step + when.wait + when.warmup + (STEPS_WITHOUT_GRAPHS if self._graphs else 0)
            _print(f"profiling: no trace, because training ended before step {first}, the first that the schedule records")

    def _step_began(self, running: profile) -> None:
        if running.current_action in {ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE}:
            origin = {name: getattr(self.plan, name) for name in ("run_id", "model", "strategy", "platform")}
            running.add_metadata_json("tprimat", json.dumps({**origin, "rank": 0, "step_of_profiler_step_0": self._first_step}))

    def _save(self, running: profile) -> None:
        plan, number = self.plan, len(self.traces) + 1
        output = Path(plan.output_directory)
        trace = output / "profiler" / plan.run_id / f"rank_0.{number}.pt.trace.json"
        unfinished = trace.with_name(f".{trace.name}")
        cycle = f"_{number}" if plan.profiling.schedule.repeat > 1 else ""
        named = output / f"profile_{BACKEND_OF[plan.platform]}_{plan.model}_{plan.run_id}{cycle}.json"
        try:
            trace.parent.mkdir(parents=True, exist_ok=True)
            unfinished.unlink(missing_ok=True)
            _print("profiling: writing the trace ...")
            running.export_chrome_trace(str(unfinished))
            unfinished.replace(trace)
            self.traces.append(trace)
            if plan.profiling.export_chrome_trace:
                named.unlink(missing_ok=True)
                try:
                    named.hardlink_to(trace)
                except OSError:  # a file system without hard links
                    shutil.copyfile(trace, named)
        except OSError as error:
            raise cannot_write(trace, error) from error


def profiler_schedule(plan: RunPlan, graphs: bool) -> Callable[[int], ProfilerAction]:
    """Return step index -> the profiler's action; the first step of training has index 0.

    With CUDA graphs the schedule begins after the steps that run without them.
    """
    return schedule(**asdict(plan.profiling.schedule), skip_first=STEPS_WITHOUT_GRAPHS if graphs else 0)


def slowed_steps(plan: RunPlan, graphs: bool) -> tuple[int, ...]:
    """Return the steps that the profiler slows down: it warms up, records, or writes the trace of the cycle before."""
    if not plan.profiling.enabled:
        return ()
    actions = [ProfilerAction.NONE, *map(profiler_schedule(plan, graphs), range(plan.steps))]
    pairs = enumerate(itertools.pairwise(actions), start=1)
    return tuple(step for step, (before, now) in pairs if now != ProfilerAction.NONE or before == ProfilerAction.RECORD_AND_SAVE)


def _print(text: str) -> None:
    sys.stderr.write(text + "\n")
