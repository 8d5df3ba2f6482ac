"""What must not leave a machine: secrets, and the names of hosts, users and home directories.

Patterns of secrets follow the documented prefixes of their issuers (Hugging Face hf_, AWS AKIA, GitHub gh*_, NVIDIA nvapi-, JSON
web tokens of RFC 7519) and the convention of names such as *_TOKEN, *_KEY and *_SECRET. Anything else is not recognised, so look
through an archive before publishing it.
"""

import getpass
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

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
