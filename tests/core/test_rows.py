"""The data files: one row adds a model, an accelerator or a published result, and a bad row is refused with its place."""

import json
import re
import shutil

import pytest

from tprimat.cli.main import start
from tprimat.core import accelerators, models, published, rows
from tprimat.core.accelerators import find_accelerator, peak_flops
from tprimat.core.errors import ConfigError
from tprimat.core.flops import parameters
from tprimat.core.models import model_shape
from tprimat.core.published import rebase, results

CACHES = [accelerators.accelerators, accelerators._by_spelling, models.models, published.results]

MODEL = """
  - name: new-1b
    layers: 16
    hidden: 2048
    heads: 16
    kv_heads: 4
    head_dim: 128
    ffn: 8192
    vocabulary: 32000
    context_tokens: 4096
    source: a model card
    date: 2026-03
"""
ACCELERATOR = """
  - name: X9000
    vendor: AMD
    device_names: [AMD Instinct X9000 OAM]
    dense_tflops: {bf16: 5000.5}
    memory_gib: 512
    bandwidth_gb_per_second: 16000
    tdp_watts: 2000
    link_gb_per_second: null
    source: a data sheet
    date: "2026"
"""
RESULT = """
  - name: new-result
    source: a blog post
    date: 2026-03-14
    engine: primus
    accelerator: AMD Instinct MI300X
    gpus: 8
    model: Llama
    shape: llama-3.1-8b
    dtype: bf16
    sequence_tokens: 4096
    tokens_per_second_all_gpus: 80000

"""


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A copy of the data files, from which the tables are read anew."""
    copy = tmp_path / "data"
    shutil.copytree(rows.DATA, copy)
    monkeypatch.setattr(rows, "DATA", copy)
    for cached in CACHES:
        cached.cache_clear()
    yield copy
    for cached in CACHES:
        cached.cache_clear()


def append(file, text):
    file.write_text(file.read_text(encoding="utf8") + text, encoding="utf8")


def add_result(data, row):
    append(data / "published.yaml", row)


def test_a_model_is_one_row(data, capsys):
    append(data / "models.yaml", MODEL)
    layer = 2048 * (16 + 2 * 4) * 128 + 2048 * 2048 + 3 * 2048 * 8192 + 2 * 2048
    assert parameters(model_shape("New-1B")).total == 16 * layer + 2048 + 2 * 32000 * 2048
    assert start("models", "tprimat models", ["new-1b", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["counts"]
    assert (row["model"], row["sequence_tokens"], row["source"]) == ("new-1b", 2048, "a model card")


def test_an_accelerator_is_one_row(data, capsys):
    append(data / "accelerators.yaml", ACCELERATOR)
    device = find_accelerator("amd instinct x9000-oam")
    assert (device.name, device.backend, device.memory_bytes, device.date) == ("X9000", "rocm", 512 * 2**30, "2026")
    assert peak_flops("X9000", "bf16") == pytest.approx(5000.5e12)
    assert start("models", "tprimat models", []) == 0
    assert "X9000" in capsys.readouterr().out


def test_a_published_result_is_one_row(data):
    add_result(data, RESULT)
    (result,) = [result for result in results() if result.name == "new-result"]
    assert (result.tokens_per_second_per_gpu, result.date) == (10000, "2026-03-14")
    assert rebase(result).mfu == pytest.approx(10000 * 48.25e9 / 1307.4e12, rel=0.001)


MISTAKES = [
    ("models.yaml", "    layers: 32\n", "", "layers: Field required"),
    ("models.yaml", "    layers: 32\n", "    layers: true\n", "layers: Input should be a valid integer"),
    ("models.yaml", "    layers: 32\n", "    layers: 0\n", "layers: 0"),
    ("models.yaml", "factor: 8.0,", "factors: 8.0,", "rope_scaling.factors: Unexpected keyword argument"),
    ("accelerators.yaml", "{fp32: 15.7,", "{fp23: 15.7,", "dense_flops.fp23"),
    ("published.yaml", "tokens_per_second_all_gpus: 59175", "tokens_per_second_all_gpus: 59e3", "should be a valid number"),
    ("published.yaml", "    shape: llama-3.1-8b\n", "    shape: llama-4\n", "no model 'llama-4'"),
    ("published.yaml", "NVIDIA H100 80GB HBM3", "NVIDIA H1000", "no accelerator 'NVIDIA H1000'"),
]
NAMED_ROWS = {
    "models.yaml": ("llama-3.1-8b", "llama-3-8b"),
    "accelerators.yaml": ("V100 SXM2 16GB",),
    "published.yaml": ("dgx-cloud-llama-3.1-8b-bf16", "tprimat-h100-llama"),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[3])
def test_a_bad_row_is_refused_with_its_file_and_its_name(data, capsys, mistake):
    file, text, wrong, message = mistake
    path = data / file
    before = path.read_text(encoding="utf8")
    assert text in before
    path.write_text(before.replace(text, wrong, 1), encoding="utf8")
    if file == "published.yaml":
        with pytest.raises(ConfigError) as refused:
            results()
        error = str(refused.value)
    else:
        assert start("models", "tprimat models", ["--json"]) == 2
        error = capsys.readouterr().err
    assert message in error
    assert f"tprimat/data/{file}" in error
    assert any(name in error for name in NAMED_ROWS[file])


def test_every_row_has_a_source_a_date_and_a_name_of_its_own():
    files = {path.name: rows.document(path) for path in rows.DATA.glob("*.yaml")}
    tables = [table for content in files.values() for table in content.values() if isinstance(table, list)]
    dated = [table for table in tables if any(isinstance(row, dict) and "date" in row for row in table)]
    assert len(dated) > 5
    for table in dated:
        assert all(row["source"] and re.fullmatch(r"\d{4}(-\d{2}){,2}", str(row["date"] or "1970")) for row in table), table
        assert len({row.get("name", place) for place, row in enumerate(table)}) == len(table), table


def test_a_file_that_is_not_yaml_is_refused_with_the_line(data):
    append(data / "models.yaml", "  - {name: [\n")
    with pytest.raises(ConfigError, match="models.yaml is not valid YAML") as caught:
        model_shape("llama-3.1-8b")
    assert "line" in caught.value.why
