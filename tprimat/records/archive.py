"""Results in one .tar.gz: reproducible, readable without unpacking, and redacted.

Redaction removes secrets and the names of hosts, users and home directories. Patterns of secrets follow the documented
prefixes of their issuers (Hugging Face hf_, AWS AKIA, GitHub gh*_, NVIDIA nvapi-, JSON web tokens of RFC 7519) and the
convention of names such as *_TOKEN, *_KEY and *_SECRET. Anything else is not recognised, so look through an archive before
publishing it.
"""

import getpass
import gzip
import io
import json
import os
import re
import socket
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from tprimat.errors import RecordError
from tprimat.records.store import cannot_write

SECRET = "[secret]"
HOST = "[host]"
ADDRESS = "[address]"
USER = "[user]"

Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]

VALUE = r"""(?!["']?\[secret)(?:"[^"\n]*"|'[^'\n]*'|[^\s"',;&)\]}]+)"""
NAMES = r"password|passwd|secret|api[_-]?key|access[_-]?key|secret[_-]?key|private[_-]?key|credentials?|token"
NO_SECRET = re.compile(r"""["']?(?:\d{1,7}|-?\d+\.\d+|None|null|true|false|<.*|\[.*|\{.*)["']?""", re.I)
"""Token ids and switches, which are frequent in training logs."""

TOKENS: tuple[Rule, ...] = (
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), SECRET),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), SECRET),
    (re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-|nvapi-|wandb_v\d_)[\w-]{16,}"), SECRET),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), SECRET),
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}", re.I), rf"\1 {SECRET}"),
    (re.compile(r"(?<=://)[^/\s:@\"']+:[^/\s@\"']+@"), f"{SECRET}@"),
    (re.compile(r"([?&](?:X-Amz-)?(?:\w*token|sig|signature|credential|key)=)[^&\s\"']+", re.I), rf"\1{SECRET}"),
    (re.compile(r"((?:wandb|api.?key|login)[^\n]{0,80}?\b)[0-9a-f]{40}\b", re.I), rf"\1{SECRET}"),
    (re.compile(rf"\b((?:[A-Z][A-Z0-9]*_)*(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS)=){VALUE}"), rf"\1{SECRET}"),
)
NAMED = re.compile(rf"""((?:^|[^\w])[\w-]*(?:{NAMES})["']?(?:\s*[=:]\s*|(?<=--\w)\s+)){VALUE}""", re.I)
FLAG = re.compile(rf"(--?(?:[\w-]*[_-])?(?:{NAMES}|key)[ =]){VALUE}", re.I)
SECRET_NAME = re.compile(rf"(?:[\w-]*[_-])?(?:{NAMES}|key)", re.I)
KEY_BEGINS, KEY_ENDS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"), re.compile(r"-----END [A-Z ]*PRIVATE KEY-----")

HOST_PLACES = (
    re.compile(r"^(\s*)([\w.-]+)(?=:\d+:\d+ \[\d+\] (?:NCCL|RCCL))", re.M),
    re.compile(
        r"\b((?:MASTER_ADDR|HOSTNAME|SLURMD_NODENAME|SLURM_\w*(?:NODELIST|NODE|HOST)\w*)[\"']?\s*[=:]\s*[\"']?)([^\s\"',;:]+)"
    ),
    re.compile(r"(?i)\b(host(?:name)?\s*[=:]\s*[\"']?)([\w.-]*[A-Za-z][\w.-]*)"),
    re.compile(r"(?i)(--(?:master|rdzv)[_-](?:addr|endpoint)[ =])([\w.-]+)"),
    re.compile(r"(\[)([\w.-]+)(?=\]:\d{2,5}\b)"),
)
"""The second group of each pattern is the name of a host."""
PRIVATE_DOMAIN = re.compile(r"\b(?:[\w-]+\.)+(?:internal|local|localdomain|lan|corp|cluster|intra)\b(?!\.?\w)")
IP_ADDRESS = re.compile(r"(?<![\w.])(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}(?=[:<]\d)")
"""Only with a port: four numbers alone can also be a version."""
NO_HOST = {"localhost", "127.0.0.1", "0.0.0.0", "none", "null", "true", "false"}
HOME = re.compile(r"/(?:home|Users)/([\w.-]+)|/root(?=[/\s\"':,;)\]]|$)")
NO_USER = {"root", "user", "runner", "shared", "data"}


@dataclass
class Redactor:
    """Redacts text. Feed all of it to `learn` first: hosts and users that it names anywhere are then redacted everywhere."""

    hosts: set[str] = field(default_factory=set)
    users: set[str] = field(default_factory=set)
    _names: re.Pattern[str] | None = None
    _people: re.Pattern[str] | None = None

    def learn(self, text: str) -> None:
        """Note the hosts and users that a text names in a recognisable place."""
        for place in HOST_PLACES:
            self.hosts.update(match[2] for match in place.finditer(text) if distinctive(match[2]))
        self.users.update(match[1] for match in HOME.finditer(text) if match[1] and match[1] not in NO_USER)
        self._names = self._people = None

    def text(self, text: str) -> str:
        """Return the text without secrets and names."""
        for pattern, instead in TOKENS:
            text = pattern.sub(instead, text)
        text = NAMED.sub(_unless_plain, FLAG.sub(_unless_plain, text))
        for place in HOST_PLACES:
            text = place.sub(_host, text)
        text = IP_ADDRESS.sub(ADDRESS, PRIVATE_DOMAIN.sub(HOST, self._hosts().sub(HOST, text)))
        return self._user().sub(USER, HOME.sub("~", text))

    def lines(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the redacted lines of a log; private keys are removed as a whole."""
        inside = False
        for line in lines:
            inside = inside or bool(KEY_BEGINS.search(line))
            yield f"{SECRET}\n" if inside else self.text(line)
            inside = inside and not KEY_ENDS.search(line)

    def document(self, value: Any, name: str = "") -> Any:
        """Return a JSON document of the same shape, with strings redacted; numbers and names of fields stay."""
        if isinstance(value, dict):
            return {key: self.document(inner, str(key)) for key, inner in value.items()}
        if isinstance(value, list):
            flags = ["", *(one if isinstance(one, str) and one.startswith("-") else "" for one in value)]
            return [self.document(inner, flag.lstrip("-")) for inner, flag in zip(value, flags, strict=False)]
        if not isinstance(value, str):
            return value
        return SECRET if value and SECRET_NAME.fullmatch(name) else self.text(value)

    def _hosts(self) -> re.Pattern[str]:
        if self._names is None:
            self._names = _any_of(self.hosts, r"(?<![\w.-]){}(?![\w-])")
        return self._names

    def _user(self) -> re.Pattern[str]:
        if self._people is None:
            self._people = _any_of(self.users, r"(?<=/){}(?=/)|(?<=USER=){0}\b|(?<=LOGNAME=){0}\b".replace("{}", "{0}"))
        return self._people


def redactor_of_this_machine() -> Redactor:
    """Return a redactor that already knows this host and this user."""
    name = socket.gethostname()
    try:
        users = {getpass.getuser()} - NO_USER
    except (OSError, KeyError):  # an account without a name
        users = set()
    return Redactor(hosts={host for host in (name, name.split(".")[0], socket.getfqdn()) if distinctive(host)}, users=users)


def distinctive(host: str) -> bool:
    """Whether a word is so clearly a host's name that it can be redacted anywhere."""
    return len(host) > 2 and host.lower() not in NO_HOST and bool(re.search(r"[A-Za-z].*[\d.-]|\d.*[A-Za-z]", host))


def _any_of(words: Iterable[str], around: str) -> re.Pattern[str]:
    """Return a pattern of any word, longest first so that no prefix of a name cuts it; without words it never matches."""
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    choice = "(?:" + "|".join(map(re.escape, longest_first)) + ")"
    return re.compile(around.format(choice) if longest_first else r"(?!)")


def _unless_plain(match: re.Match[str]) -> str:
    value = match[0][len(match[1]) :]
    kept = NO_SECRET.fullmatch(value) and "pass" not in match[1].lower() and "secret" not in match[1].lower()
    return match[0] if kept else match[1] + SECRET


def _host(match: re.Match[str]) -> str:
    plain = match[2].lower() in NO_HOST or match[2].isdigit()
    return match[0] if plain else match[1] + HOST


# The archive.

SUFFIXES = (".tar.gz", ".tgz")
RESULTS = ("run.json", "steps.jsonl", "telemetry.jsonl", "probes.jsonl", "benchmark_*.json", "train_*.json")
"""Files that results are read from; nothing else is unpacked."""
PACKED = (*RESULTS, "plan.json", "*.log", "*.yaml")
NUMBERS_ONLY = ("steps.jsonl", "telemetry.jsonl")
REPORT = "report.html"
LARGEST = 4 * 2**30
"""Most bytes of an unpacked archive."""


def is_archive(path: Path) -> bool:
    """Whether a path has an archive's suffix."""
    return path.name.endswith(SUFFIXES)


class _Bounded(io.RawIOBase):
    """A stream of limited length: a small file can unpack to any size."""

    def __init__(self, stream: gzip.GzipFile, where: Path, most: int) -> None:
        self.stream, self.where, self.left = stream, where, most

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes."""
        requested = self.left + 1 if size < 0 else size
        content = self.stream.read(min(requested, self.left + 1))
        self.left -= len(content)
        if self.left < 0:
            raise RecordError(f"{self.where} unpacks to more than {LARGEST:,} bytes.", where=str(self.where))
        return content


@contextmanager
def unpacked(path: Path, most: int = LARGEST) -> Iterator[Path]:
    """Unpack the results of an archive into a temporary folder: regular files only, and none outside the folder.

    Raises:
        RecordError: not an archive, damaged, too large, or with a path that leads outside.
    """
    with tempfile.TemporaryDirectory(prefix="tprimat-") as folder:
        try:
            with (
                gzip.open(path) as stream,
                tarfile.open(fileobj=cast(IO[bytes], _Bounded(stream, path, most)), mode="r|") as members,
            ):
                for member in members:
                    _extract(members, member, Path(folder), path)
        except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RecordError(f"{path} is not a complete archive of results.", where=str(path), why=reason) from error
        yield Path(folder)


def _extract(members: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, archive: Path) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name:
        raise RecordError(
            f"{archive} names {member.name}, a path outside the archive.", where=str(archive), fix="do not trust it"
        )
    if not member.isreg() or not _fits(name.name, RESULTS):
        return
    source = members.extractfile(member)
    if source is None:
        return
    target = folder.joinpath(*name.parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        while part := source.read(1 << 20):
            file.write(part)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def pack(places: Sequence[Path], target: Path, redactor: Redactor) -> list[str]:
    """Write a redacted archive of all results, plans and logs in some places.

    The same files give the same bytes: entries are sorted, without the files' times, owners and modes.

    Args:
        places: folders and files.
        target: replaced in one step.
        redactor: learns the hosts and users that the files name.

    Returns:
        The names in the archive.

    Raises:
        RecordError: a place is missing or is an archive, a file cannot be read, or the target cannot be written.
    """
    files = dict(sorted(_files(places, target)))
    for source in files.values():
        if source.name not in NUMBERS_ONLY:
            _each_line(source, redactor)
    with _written(target) as archive:
        for name, source in files.items():
            with redacted(source, redactor) as content:
                _add(archive, name, content)
    return list(files)


def with_texts(packed: Path, target: Path, texts: dict[str, str]) -> None:
    """Copy an archive and put some texts, name -> content, before its files."""
    with _written(target) as archive, tarfile.open(packed) as members:
        for name, text in sorted(texts.items()):
            _add(archive, name, io.BytesIO(text.encode()))
        for member in members:
            archive.addfile(member, members.extractfile(member))


@contextmanager
def _written(target: Path) -> Iterator[tarfile.TarFile]:
    """Open an archive for writing; it replaces the target when it is complete."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            temporary.open("wb") as raw,
            gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            yield archive
        temporary.replace(target)
    except OSError as error:
        raise cannot_write(target, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _each_line(source: Path, redactor: Redactor) -> None:
    try:
        with source.open(encoding="utf8", errors="replace") as lines:
            for line in lines:
                redactor.learn(line)
    except OSError as error:
        raise RecordError(f"{source} cannot be read: {error.strerror}.", where=str(source)) from error


def _add(archive: tarfile.TarFile, name: str, content: IO[bytes]) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = content.seek(0, io.SEEK_END)
    content.seek(0)
    entry.mode = 0o644
    archive.addfile(entry, content)


def _files(places: Sequence[Path], target: Path) -> Iterator[tuple[str, Path]]:
    """Yield names in the archive with their files. Folders of the same name are numbered; links are not followed."""
    taken: set[str] = set()
    for place in places:
        if is_archive(place) or not place.exists():
            what = "is an archive already" if place.exists() else "does not exist"
            raise RecordError(f"{place} {what}.", where=str(place), fix="name folders and files with results")
        name = root = place.resolve().name or "results"
        number = 2
        while root in taken:
            root, number = f"{name}-{number}", number + 1
        taken.add(root)
        if place.is_file():
            yield (root if _fits(root, RESULTS) else f"benchmark_{root}"), place
            continue
        for folder, _, names in os.walk(place):
            for file in (Path(folder, name) for name in names if _fits(name, PACKED)):
                if not file.is_symlink() and file != target:
                    yield f"{root}/{file.relative_to(place).as_posix()}", file


@contextmanager
def redacted(source: Path, redactor: Redactor) -> Iterator[IO[bytes]]:
    """Open the redacted content of a file; a file without secrets and names keeps every byte."""
    with tempfile.TemporaryFile() as content:
        if source.name in NUMBERS_ONLY:
            content.write(source.read_bytes())
        elif source.suffix in {".json", ".jsonl"}:
            content.write(_redacted_documents(source, redactor).encode())
        else:
            with source.open(encoding="utf8", errors="replace", newline="") as lines:
                content.writelines(line.encode() for line in redactor.lines(lines))
        yield content


def _redacted_documents(source: Path, redactor: Redactor) -> str:
    text = source.read_text(encoding="utf8", errors="replace")
    if source.suffix == ".json":
        return _redacted_document(text, redactor, indent=2)
    return "".join(_redacted_document(line, redactor, indent=None) for line in text.splitlines(keepends=True))


def _redacted_document(text: str, redactor: Redactor, indent: int | None) -> str:
    """Redact a document; a damaged one as text."""
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        return redactor.text(text)
    clean = redactor.document(document)
    return text if clean == document else json.dumps(clean, indent=indent) + "\n"
