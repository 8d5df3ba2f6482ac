"""Facts have grades; older records get theirs from where their facts came from, and never a better one."""

from pathlib import Path

import pytest
from changes import evidence as evidence_of
from changes import replace

from tprimat.records.discover import read_result
from tprimat.records.evidence import facts, grade_of, graded

RUN = read_result(Path(__file__).parents[1] / "runs" / "h100" / "runs" / "h100-llama-0").run


@pytest.mark.parametrize(
    ("fields", "options", "name", "grade"),
    [
        ({"source": "running_framework", "matmul_dtype": "bf16"}, {}, "matmul_dtype", "observed"),
        ({"source": "running_framework", "recompute": "none"}, {}, "recompute", "resolved"),
        ({"source": "running_framework", "matmul_dtype": "fp8", "transformer_engine": True}, {}, "matmul_dtype", "resolved"),
        (
            {"source": "running_framework", "matmul_dtype": "fp8", "transformer_engine": True},
            {"layers": "x"},
            "matmul_dtype",
            "observed",
        ),
        ({"source": "log", "matmul_dtype": "fp8"}, {}, "matmul_dtype", "resolved"),
        ({"source": "log"}, {}, "matmul_dtype", "stated"),
        ({"source": "log"}, {}, "attention", None),
    ],
)
def test_the_grade_of_a_fact(fields, options, name, grade):
    assert grade_of(replace(RUN, evidence=evidence_of(**fields), engine_options=options), name) == grade


def test_without_evidence_a_record_only_states():
    assert grade_of(replace(RUN, evidence=None), "matmul_dtype") == "stated"
    assert grade_of(replace(RUN, evidence=None, matmul_dtype=None), "matmul_dtype") is None


def test_every_known_fact_gets_a_grade():
    evidence = graded(evidence_of(source="log", matmul_dtype="bf16", sequence_parallel=False), {"matmul_dtype": "resolved"})
    assert facts(evidence) == {"matmul_dtype": "bf16", "sequence_parallel": False}
    assert evidence.grades == {"matmul_dtype": "resolved", "sequence_parallel": "observed"}
