"""The only reader and writer of a run's files.

OUTPUT/runs/RUN_ID/   plan.json   what was asked
                      run.json    what ran and how it ended, replaced atomically
                      steps.jsonl one line a step, appended as the step ends
                      telemetry.jsonl, training.log
                      micro_batch/N/  the same of a search for the micro-batch, without run.json, with trials.jsonl
"""

from dataclasses import dataclass
from pathlib import Path

from tprimat.records.files import append_line, from_json, read_lines, read_text, to_json, write_atomically
from tprimat.records.schema import MicroBatchTrial, ProbeRecord, RunRecord, StepRecord, TelemetrySample


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The folder of one run."""

    path: Path

    @property
    def plan_file(self) -> Path:
        """What the worker reads."""
        return self.path / "plan.json"

    @property
    def run_file(self) -> Path:
        """The RunRecord."""
        return self.path / "run.json"

    @property
    def steps_file(self) -> Path:
        """StepRecords, one a line."""
        return self.path / "steps.jsonl"

    @property
    def telemetry_file(self) -> Path:
        """TelemetrySamples, one a line."""
        return self.path / "telemetry.jsonl"

    @property
    def trials_file(self) -> Path:
        """MicroBatchTrials, one a line."""
        return self.path / "trials.jsonl"

    @property
    def log_file(self) -> Path:
        """Everything the framework printed."""
        return self.path / "training.log"

    def write_run(self, run: RunRecord) -> None:
        """Replace run.json."""
        write_atomically(self.run_file, to_json(run, indent=2) + "\n")

    def read_run(self) -> RunRecord:
        """The record as it stands; a run under way says so in its outcome."""
        return from_json(RunRecord, read_text(self.run_file), where=str(self.run_file))

    def append_step(self, step: StepRecord) -> None:
        """Add one step; it is on disk, as far as the operating system is alive, when this returns."""
        append_line(self.steps_file, to_json(step))

    def read_steps(self) -> tuple[StepRecord, ...]:
        """All steps that were written whole."""
        return tuple(read_lines(StepRecord, self.steps_file))

    def append_trial(self, trial: MicroBatchTrial) -> None:
        """Add one size that was tried."""
        append_line(self.trials_file, to_json(trial))

    def read_trials(self) -> tuple[MicroBatchTrial, ...]:
        """All sizes that were tried."""
        return tuple(read_lines(MicroBatchTrial, self.trials_file))

    def append_telemetry(self, sample: TelemetrySample) -> None:
        """Add one reading."""
        append_line(self.telemetry_file, to_json(sample))

    def read_telemetry(self) -> tuple[TelemetrySample, ...]:
        """All readings."""
        return tuple(read_lines(TelemetrySample, self.telemetry_file))


def append_probe(path: Path, probe: ProbeRecord) -> None:
    """Add one measured operation to a probes.jsonl."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, to_json(probe))


def read_probes(path: Path) -> tuple[ProbeRecord, ...]:
    """All measured operations of a probes.jsonl."""
    return tuple(read_lines(ProbeRecord, path))
