"""Archives that are made, opened again, and attacked."""

import gzip
import io
import shutil
import tarfile
from pathlib import Path

import pytest

from tprimat.analyze.metrics import MetricOptions
from tprimat.core.errors import RecordError
from tprimat.records.discover import load_results, probes_in, unpacked, write_archive
from tprimat.runner.analysis import packed, read_results

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


def pack(target, *folders):
    """What `tprimat archive` writes, without the report."""
    measured = read_results(folders, MetricOptions(), {}, to_share=True).measured
    write_archive(target, packed(measured, probes_in(folders)[0], folders))


def test_what_is_packed_is_read_again(tmp_path):
    target, folders = tmp_path / "both.tar.gz", [RUNS / "h100", RUNS / "foreign"]
    pack(target, *folders)
    before, after = (read_results(places, MetricOptions(), {}) for places in (folders, [target]))
    assert after.problems == []
    ones, others = ({item.result.run.run_id: item for item in results.measured} for results in (before, after))
    assert ones.keys() == others.keys()
    for name, item in ones.items():
        assert (item.result.steps, item.metrics) == (others[name].result.steps, others[name].metrics)
        assert item.not_counted == others[name].not_counted
    assert all(target in item.result.path.parents for item in after.measured)


def test_the_same_files_give_the_same_bytes_whatever_their_times(tmp_path):
    copy = tmp_path / "h100"
    shutil.copytree(RUNS / "h100", copy)
    for file in copy.rglob("*"):
        file.touch()
    pack(tmp_path / "one.tar.gz", RUNS / "h100")
    pack(tmp_path / "two.tar.gz", copy)
    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()


def test_folders_of_one_name_stay_apart(tmp_path):
    for place, run in (("a", "h100-llama-0"), ("b", "h100-llama-1")):
        shutil.copytree(RUNS / "h100" / "runs" / run, tmp_path / place / "output" / "run")
    (tmp_path / "a" / "output-2").mkdir()
    places = [tmp_path / "a" / "output-2", *(tmp_path / one / "output" for one in ("a", "b", "a"))]
    pack(tmp_path / "x.tar.gz", *places)
    paths = [result.path.relative_to(tmp_path) for result in load_results([tmp_path / "x.tar.gz"])[0]]
    assert sorted(map(str, paths)) == ["x.tar.gz/output-3/run", "x.tar.gz/output/run"]


@pytest.mark.parametrize("name", ["../evil/run.json", "a/../../run.json"])
def test_a_name_that_leads_outside_is_refused(tmp_path, name):
    archive = an_archive(tmp_path / "x.tar.gz", (name, b"{}"))
    results, problems = load_results([archive])
    assert results == []
    assert "outside the destination" in str(problems[0])


def test_links_and_other_files_are_passed_over(tmp_path):
    link = tarfile.TarInfo("a/run.json")
    link.type, link.linkname = tarfile.SYMTYPE, "../../etc/passwd"
    with unpacked(an_archive(tmp_path / "x.tar.gz", link, ("weights.bin", b"0"))) as folder:
        assert list(folder.rglob("*")) == []


def test_a_damaged_byte_is_named_wherever_it_is(tmp_path):
    pack(tmp_path / "whole.tar.gz", RUNS / "cpu")
    whole = (tmp_path / "whole.tar.gz").read_bytes()
    for place in (*range(12, len(whole), 97), len(whole) - 5):  # the last one in the checksum
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (tmp_path / "x.tar.gz").write_bytes(damaged)
        results, problems = load_results([tmp_path / "x.tar.gz"])
        assert (results, len(problems)) == ([], 1), place


def test_an_archive_that_swells_is_refused_before_it_is_written(tmp_path):
    archive = an_archive(tmp_path / "x.tar.gz", ("a/run.json", b"0" * 900_000), ("b/run.json", b"0" * 900_000))
    with pytest.raises(RecordError, match="unpacks to more than"), unpacked(archive, most=1_000_000):
        pass
    archive.write_bytes(archive.read_bytes() + gzip.compress(bytes(70 << 20)))
    with pytest.raises(RecordError, match="has data after the end"), unpacked(archive):
        pass


def test_a_damaged_result_inside_is_named_by_its_place_in_the_archive(tmp_path):
    archive = an_archive(tmp_path / "x.tar.gz", ("out/benchmark_cuda_llama.json", b"{"))
    _, problems = load_results([archive])
    assert f"{archive}/out/benchmark_cuda_llama.json" in str(problems[0])
    assert "/tprimat-" not in str(problems[0]).replace(str(archive), "")
