"""Archives that are made, opened again, and attacked."""

import gzip
import io
import shutil
import tarfile
from pathlib import Path

import pytest

from tprimat.core.errors import RecordError
from tprimat.records.archive import pack, unpacked
from tprimat.records.discover import load_results
from tprimat.records.redaction import Redactor

RUNS = Path(__file__).parents[1] / "runs"


def an_archive(path, *members):
    """Members: (name, content), or a TarInfo of another kind."""
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            entry = tarfile.TarInfo(member[0])
            entry.size = len(member[1])
            archive.addfile(entry, io.BytesIO(member[1]))
    return path


def test_what_is_packed_is_read_again(tmp_path):
    target = tmp_path / "both.tar.gz"
    pack([RUNS / "h100", RUNS / "foreign"], target, Redactor())
    before, _ = load_results([RUNS / "h100", RUNS / "foreign"])
    after, problems = load_results([target])
    assert problems == []
    assert [(one.run.run_id, one.steps) for one in after] == [(one.run.run_id, one.steps) for one in before]
    assert all(target in result.path.parents for result in after)


def test_the_same_files_give_the_same_bytes_whatever_their_times(tmp_path):
    copy = tmp_path / "h100"
    shutil.copytree(RUNS / "h100", copy)
    for file in copy.rglob("*"):
        file.touch()
    pack([RUNS / "h100"], tmp_path / "one.tar.gz", Redactor())
    pack([copy], tmp_path / "two.tar.gz", Redactor())
    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()


def test_folders_of_one_name_stay_apart(tmp_path):
    for place, run in (("a", "h100-llama-0"), ("b", "h100-llama-1")):
        shutil.copytree(RUNS / "h100" / "runs" / run, tmp_path / place / "output" / "run")
    names = pack([tmp_path / "a" / "output", tmp_path / "b" / "output"], tmp_path / "x.tar.gz", Redactor()).names
    assert {name.split("/")[0] for name in names} == {"output", "output-2"}
    assert len(load_results([tmp_path / "x.tar.gz"])[0]) == 2


def test_links_and_strangers_are_not_packed(tmp_path):
    folder = tmp_path / "output"
    folder.mkdir()
    (tmp_path / "private.log").write_text("private")
    (folder / "linked.log").symlink_to(tmp_path / "private.log")
    (folder / "weights.bin").write_bytes(b"0" * 100)
    (folder / "training.log").write_text("step 1\n")
    assert pack([folder], tmp_path / "x.tar.gz", Redactor()).names == ["output/training.log"]


@pytest.mark.parametrize("name", ["../evil/run.json", "/tmp/evil/run.json", "a/../../run.json", "a\\..\\run.json"])
def test_a_name_that_leads_outside_is_refused(tmp_path, name):
    archive = an_archive(tmp_path / "x.tar.gz", (name, b"{}"))
    results, problems = load_results([archive])
    assert results == []
    assert "a path outside the archive" in str(problems[0])


def test_links_in_an_archive_are_passed_over(tmp_path):
    link = tarfile.TarInfo("run.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    hard = tarfile.TarInfo("a/run.json")
    hard.type, hard.linkname = tarfile.LNKTYPE, "../../etc/passwd"
    with unpacked(an_archive(tmp_path / "x.tar.gz", link, hard)) as folder:
        assert list(folder.rglob("*")) == []


def test_an_archive_that_swells_is_refused_before_it_is_written(tmp_path):
    archive = an_archive(tmp_path / "x.tar.gz", ("training.log", b"0" * 5_000_000), ("run.json", b"{}"))
    assert archive.stat().st_size < 20_000
    with pytest.raises(RecordError, match="unpacks to more than"), unpacked(archive, most=1_000_000):
        pass


def test_an_archive_that_swells_like_no_result_does_is_refused_early(tmp_path):
    bomb = an_archive(tmp_path / "bomb.tar.gz", ("training.log", b"0" * 60_000_000), ("run.json", b"{}"))
    with pytest.raises(RecordError, match=r"unpacks to more than 16,777,216 bytes\."), unpacked(bomb):
        pass
    lines = b"".join(b'{"step":%d,"step_seconds":0.25,"tokens":64}\n' % number for number in range(500_000))
    honest = an_archive(tmp_path / "honest.tar.gz", ("steps.jsonl", lines))
    with unpacked(honest) as folder:
        assert (folder / "steps.jsonl").stat().st_size == len(lines) > 16 * 2**20


@pytest.mark.parametrize("cut", [0, 10, 700, -200])
def test_a_damaged_archive_is_named_and_hides_no_other(tmp_path, cut):
    whole = tmp_path / "whole.tar.gz"
    pack([RUNS / "h100"], whole, Redactor())
    damaged = tmp_path / "damaged.tar.gz"
    damaged.write_bytes(whole.read_bytes()[:cut])
    results, problems = load_results([damaged, RUNS / "cpu"])
    assert [one.run.run_id for one in results] == ["cpu-llama-0"]
    assert "damaged.tar.gz is not a complete archive" in str(problems[0])


def test_text_that_is_only_called_an_archive_is_refused(tmp_path):
    (tmp_path / "x.tar.gz").write_text("hello")
    (tmp_path / "y.tar.gz").write_bytes(gzip.compress(b"hello" * 1000))
    results, problems = load_results([tmp_path / "x.tar.gz", tmp_path / "y.tar.gz"])
    assert (results, len(problems)) == ([], 2)


def test_a_damaged_result_inside_is_named_by_its_place_in_the_archive(tmp_path):
    archive = an_archive(tmp_path / "x.tar.gz", ("out/benchmark_cuda_llama.json", b"{"))
    _, problems = load_results([archive])
    assert f"{archive}/out/benchmark_cuda_llama.json" in str(problems[0])
    assert "/tprimat-" not in str(problems[0]).replace(str(archive), "")
