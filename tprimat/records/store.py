"""The only reader and writer of a run's files.

OUTPUT/runs/RUN_ID/   plan.json   what was requested
                      run.json    what ran and how it ended, replaced atomically
                      steps.jsonl one line a step, appended as the step ends
                      telemetry.jsonl, training.log
                      micro_batch/N/  the same for a search for the micro-batch, with trials.jsonl instead of run.json
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
        """The RunPlan, which the worker reads."""
        return self.path / "plan.json"

    @property
    def run_file(self) -> Path:
        """The RunRecord."""
        return self.path / "run.json"

    @property
    def steps_file(self) -> Path:
        """StepRecords, one per line."""
        return self.path / "steps.jsonl"

    @property
    def telemetry_file(self) -> Path:
        """TelemetrySamples, one per line."""
        return self.path / "telemetry.jsonl"

    @property
    def trials_file(self) -> Path:
        """MicroBatchTrials, one per line."""
        return self.path / "trials.jsonl"

    @property
    def log_file(self) -> Path:
        """Everything the framework printed."""
        return self.path / "training.log"

    def write_run(self, run: RunRecord) -> None:
        """Replace run.json."""
        write_atomically(self.run_file, to_json(run, indent=2) + "\n")

    def read_run(self) -> RunRecord:
        """Read the current record; the outcome of a run under way is running."""
        return from_json(RunRecord, read_text(self.run_file), where=str(self.run_file))

    def append_step(self, step: StepRecord) -> None:
        """Append one step; it survives the end of this process."""
        append_line(self.steps_file, to_json(step))

    def read_steps(self) -> tuple[StepRecord, ...]:
        """Read all complete steps."""
        return tuple(read_lines(StepRecord, self.steps_file))

    def append_trial(self, trial: MicroBatchTrial) -> None:
        """Append one trial."""
        append_line(self.trials_file, to_json(trial))

    def read_trials(self) -> tuple[MicroBatchTrial, ...]:
        """Read all trials."""
        return tuple(read_lines(MicroBatchTrial, self.trials_file))

    def append_telemetry(self, sample: TelemetrySample) -> None:
        """Append one reading."""
        append_line(self.telemetry_file, to_json(sample))

    def read_telemetry(self) -> tuple[TelemetrySample, ...]:
        """Read all readings."""
        return tuple(read_lines(TelemetrySample, self.telemetry_file))


def append_probe(path: Path, probe: ProbeRecord) -> None:
    """Append one measured operation to a probes.jsonl."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, to_json(probe))


def read_probes(path: Path) -> tuple[ProbeRecord, ...]:
    """Read all measured operations of a probes.jsonl."""
    return tuple(read_lines(ProbeRecord, path))
