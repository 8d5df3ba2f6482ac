"""How well a fact about a run is known: observed in the running program, resolved by the framework, or only stated."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from tprimat.records.schema import Evidence, Grade, RunRecord
from tprimat.records.upgrade import FACTS

ONCE_READ_FROM_CONFIGURATION = ("recompute", "sequence_parallel", "data")
"""Facts that records without grades took from the framework's configuration."""
CAUTION = "caution: "
"""Begins a note of a log that belongs to every analysis of its run."""
REDIRECTED = "Megatron-Core's CUDA calls ran on the CPU: this shows that it works, not how fast anything is."
"""The note of a run whose trainer shares its CPU."""
GRAPH_OPTIONS = ("cuda_graphs", "cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
"""Options of the embedded engine, NeMo and Megatron-LM under which CUDA graphs run the layers."""
STEPS_WITHOUT_GRAPHS = 3
"""The first steps of the embedded engine under cuda_graphs: two run as usual, and Python records the third."""
NO_FACTS = ("source", "workload", "grades", "notes")


def facts(evidence: Evidence) -> dict[str, object]:
    """Return what is known of a run, by field."""
    names = [one.name for one in fields(evidence) if one.name not in NO_FACTS]
    return evidence.workload.facts | {name: value for name in names if (value := getattr(evidence, name)) is not None}


def with_facts(evidence: Evidence, **stated: Any) -> Evidence:
    """Return evidence with more facts, by field: those of a workload, and its own."""
    own = {name: value for name, value in stated.items() if name not in FACTS}
    seen = {name: stated[name] for name in FACTS if name in stated}
    return replace(evidence, workload=replace(evidence.workload, **seen), **own)


def captures_layers(options: Mapping[str, object]) -> bool:
    """Return whether CUDA graphs run the layers, by the options of an engine."""
    return any(options.get(name) not in (None, False, "none", "auto") for name in GRAPH_OPTIONS)


def cautions(evidence: Evidence | None) -> list[str]:
    """Return the notes of a log that belong to every analysis of its run."""
    return [] if evidence is None else [note.removeprefix(CAUTION) for note in evidence.notes if note.startswith(CAUTION)]


def other_notes(evidence: Evidence | None) -> list[str]:
    """Return the notes that are no cautions, which are among the warnings of the run's metrics."""
    return [] if evidence is None else [note for note in evidence.notes if not note.startswith(CAUTION)]


def graded(evidence: Evidence, exceptions: Mapping[str, Grade]) -> Evidence:
    """Return evidence whose facts are graded as observed, but for some exceptions."""
    return replace(evidence, grades={name: exceptions.get(name, "observed") for name in facts(evidence)})


def grade_of(run: RunRecord, name: str) -> Grade | None:
    """Return how well a fact is known; None where it is not recorded.

    A record without grades is an older one, or from a log: what a framework prints of its settings is resolved. What only the
    record holds, and no evidence, is stated.
    """
    evidence = run.evidence
    value = None if evidence is None else facts(evidence).get(name)
    if evidence is None or value is None:
        return "stated" if name in run.workload.facts else None
    if name in evidence.grades:
        return evidence.grades[name]
    if evidence.source == "log" or name in ONCE_READ_FROM_CONFIGURATION:
        return "resolved"
    # An engine without recorded options took fp8 from Transformer Engine's configuration.
    believed = name == "matmul_dtype" and value == "fp8" and evidence.transformer_engine and not run.engine_options
    return "resolved" if believed else "observed"
