"""What must not leave a machine: secrets, addresses, paths, and the names of hosts and users. One set of rules for all that does.

Tokens that are known by their own form follow gitleaks (tprimat/data/secrets.yaml) and the prefixes that their issuers document;
all others are known by the name of their value, such as *_TOKEN, *_PASS and Authorization. Anything else is not recognised, so
look through an archive before publishing it.
"""

import getpass
import hashlib
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

SECRET = "[secret]"
HOST = "[host]"
ADDRESS = "[address]"
USER = "[user]"
EMAIL = "[email]"
PATH = "[path]"
UNKNOWN = "[value]"

Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]

VALUE = r"""(?!["']?\[secret)(?:"[^"\n]*"|'[^'\n]*'|[^\s"',;&)\]}]+)"""
NAMES = (
    r"password|passwd|passphrase|secret|(?:api|access|account|secret|private|shared|storage|subscription)[_-]?key|credentials?|token"
    r"|(?<=[_-])(?:pwd|pw|auth)|(?<=[_-])(?<!forward[_-])(?<!backward[_-])pass"
)
NO_SECRET = re.compile(r"""["']?(?:\d{1,7}|-?\d+\.\d+|None|null|true|false|<.*|\[.*|\{.*)["']?""", re.I)
"""Token ids and switches, which are frequent in training logs."""

TOKENS: tuple[Rule, ...] = (
    (re.compile(r"\b(?:hf_|api_org_)[A-Za-z0-9]{16,}"), SECRET),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), SECRET),
    (
        re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-|nvapi-|wandb_v\d_|AIza|GOCSPX-|gsk_|xai-|r8_)[\w-]{16,}"),
        SECRET,
    ),
    (re.compile(r"\b(?:key-[0-9a-f]{32}|\d{8,10}:AA[\w-]{33})\b"), SECRET),  # Mailgun, Telegram
    (re.compile(r"(\bcurl\b[^\n]{0,200}?\s(?:-u|--user)[ =]?[\"']?[^\s:\"']+:)[^\s\"']+"), rf"\1{SECRET}"),
    (re.compile(r"\b(?:(?:sk|rk|pk|whsec)_(?:live_|test_|prod_)?[A-Za-z0-9]{16,}|(?:hv[sbr]|ya29)\.[\w-]{16,})"), SECRET),
    (re.compile(r"(\b(?:Set-)?Cookie[\"']?\s*[:=]\s*[\"']?)[^\n\"']+", re.I), rf"\1{SECRET}"),
    (re.compile(r"(passphrase[\"']?\s*[:=]\s*[\"']?)[^\n\"',;]+", re.I), rf"\1{SECRET}"),
    (re.compile(r"(\"(?:auth|identitytoken|registrytoken)\\?\"\s*:\s*\\?\")[^\"\\]+"), rf"\1{SECRET}"),
    (re.compile(r"\b(machine\s+)\S+(\s+login\s+)\S+(\s+password\s+)\S+"), rf"\1{HOST}\2{USER}\3{SECRET}"),
    (re.compile(r"^(\s*(?:login|password|account)\s+)\S+(?=\s*$)", re.M), rf"\1{SECRET}"),
    (re.compile(r"\b((?:pwd|pass)\s*=\s*)(?!/)[^\s\"',;&]+", re.I), rf"\1{SECRET}"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), SECRET),
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}", re.I), rf"\1 {SECRET}"),
    (re.compile(r"(?<=://)[^/\s:@\"']*:[^/\s\"']+@"), f"{SECRET}@"),
    (re.compile(r"([?&](?:X-Amz-)?(?:\w*token|sig|signature|credential|key)=)[^&\s\"']+", re.I), rf"\1{SECRET}"),
    (re.compile(r"((?:wandb|api.?key|login)[^\n]{0,80}?\b)[0-9a-f]{40}\b", re.I), rf"\1{SECRET}"),
    (re.compile(rf"\b((?:[A-Z][A-Z0-9]*_)*(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS)=){VALUE}"), rf"\1{SECRET}"),
)
NAMED = re.compile(rf"""((?:^|[^\w])[\w-]{{0,60}}(?:{NAMES})["']?(?:\s*[=:]\s*|(?<=--\w)\s+)){VALUE}""", re.I)
FLAG = re.compile(rf"((?<![\w-])--?(?:[\w-]{{0,60}}[_-])?(?:{NAMES}|key|pass|pwd)[ =]){VALUE}", re.I)
SECRET_NAME = re.compile(rf"(?:[\w-]*[_-])?(?:{NAMES}|key|pass|pwd|auth|cookie)", re.I)
KEY_BEGINS, KEY_ENDS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"), re.compile(r"-----END [A-Z ]*PRIVATE KEY-----")

HOST_PLACES = (
    re.compile(r"^(\s*)([\w.-]+)(?=:\d+:\d+ \[\d+\] (?:NCCL|RCCL))", re.M),
    re.compile(
        r"\b((?:MASTER_ADDR|HOSTNAME|SLURMD_NODENAME|SLURM_\w*(?:NODELIST|NODE|HOST)\w*)[\"']?\s*[=:]\s*[\"']?)([^\s\"',;:]+)"
    ),
    re.compile(r"(?i)\b((?:host|node)(?:name)?[\"']?\s*[=:]\s*[\"']?)([\w.-]*[A-Za-z][\w.-]*)"),
    re.compile(r"(?i)(\bnode \d+ \()([\w.-]+)(?=\))"),
    re.compile(r"(?i)(--(?:master|rdzv)[_-](?:addr|endpoint)[ =])([\w.-]+)"),
    re.compile(r"(\[)([\w.-]+)(?=\]:\d{2,5}\b)"),
)
"""The second group of each pattern is the name of a host."""
PRIVATE_DOMAIN = re.compile(r"\b(?:[\w-]{1,63}\.){1,8}(?:internal|local|localdomain|lan|corp|cluster|intra)\b(?!\.?\w)")
IPV4 = re.compile(r"(?<![\w.-])(?<!==)\d{1,3}(?:\.\d{1,3}){3}(?![\w.]\w|-\w)")
IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])")
VERSION = re.compile(
    r"(?:nvidia|cu(?:da|dnn|blas|fft|rand|sparse|solver)|[nr]ccl|rocm|hip|driver|version|release|tag)[\w-]*\W{0,3}$", re.I
)
"""In front of four numbers that are a version and no address."""
MAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?!sha256)[A-Za-z][\w-]{0,62}((?:\.[\w-]{1,63})*)")
"""An e-mail address, or a user at a host."""
NO_HOST = {"localhost", "127.0.0.1", "0.0.0.0", "none", "null", "true", "false"}
HOME = re.compile(r"/(?:home|Users)/([\w.-]+)|/root(?=[/\s\"':,;)\]]|$)")
NO_USER = {"root", "user", "runner", "shared", "data", "none", "null", "true", "false", "self"}
ORDINARY = {"admin", "ubuntu", "adam", "train", "test", "tests", "torch", "llama", "model", "models", "build", "work", "main"}
"""Names of users that are also words of training logs: redacted in paths only."""
USER_PLACES = re.compile(r"\b((?:USER|LOGNAME|USERNAME|user_?name|login|user)[\"']?\s*[:=]\s*[\"']?)([A-Za-z_][\w.-]*)")
"""The second group is the name of a user."""
PART = r"""[^\s/"'`:,;()\[\]{}<>|=\\]+"""
ABSOLUTE = re.compile(
    rf"""(?:(?<=file://)|(?<![\w./~\]\[\\-]))/(?!(?:usr|opt|dev|proc|sys|lib|lib64|etc|bin|sbin)/)(?:{PART}/)+(?:{PART})?"""
)
"""A path with two parts or more, except those of the system."""
PACKAGES = re.compile(r"(?:site|dist)-packages/.*|(?<=/)python3\.\d+/.*")
"""What is the same on every machine."""
LONG_WORD = re.compile(r"[\w.~+/=-]{18,}")
"""Every token that is known by its form holds one; most lines do not."""
LONGEST_LINE = 20_000
"""Characters of a line; the rest is left out."""
SHORT_USER = 3
KNOWN_VARIABLE = re.compile(
    r"(?:N?CCL|RCCL|NCCLX?|OFI|GLOO|UCX|UCC|FI|CUDA|CUDNN|CUBLAS|NVIDIA|NVTE|NVSHMEM|HIP|HIPBLASLT|ROCM|ROCR|ROCBLAS|HSA|GPU|AMD|MIOPEN|TE"
    r"|TORCH|TORCHDYNAMO|TORCHINDUCTOR|TORCHELASTIC|PYTORCH|TRITON|ATEN|ONEDNN|DNNL|OMP|GOMP|MKL|KMP|OPENBLAS|MALLOC|MASTER|WORLD|LOCAL|RANK|PYTHON|TOKENIZERS|HF_HUB"
    r"|HF_DATASETS|TRANSFORMERS|PRIMUS|MEGATRON|NEMO|SLURM|TF)(?:[A-Z0-9]*_[A-Z0-9_]*)?|PYTHON[A-Z]+|OMP_\w+|HF_HOME"
    r"|LD_PRELOAD|GLIBC_TUNABLES|DISABLE_ADDMM_HIP_LT"
)
"""Environment variables whose values matter for speed and are not secrets."""


ENVIRONMENT_SETTING = re.compile(r"(\benvironment\.(\w+)=)(.*)", re.S)


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
        self.users.update(match[2] for match in USER_PLACES.finditer(text) if match[2].lower() not in NO_USER)
        self._names = self._people = None

    def secrets(self, text: str) -> str:
        """Return the text without secrets; names, addresses and paths stay."""
        if len(text) > LONGEST_LINE:  # the patterns take time that grows faster than a line
            text = "".join(map(_shortened, text.splitlines(keepends=True)))
        lower = text.lower()
        for words, pattern in known_tokens() if LONG_WORD.search(text) else ():
            if any(word in lower for word in words):
                text = pattern.sub(_token, text)
        for pattern, instead in TOKENS:
            text = pattern.sub(instead, text)
        return NAMED.sub(_unless_plain, FLAG.sub(_unless_plain, text))

    def text(self, text: str) -> str:
        """Return the text without secrets, names, addresses and absolute paths."""
        text = self.secrets(text)
        for place in HOST_PLACES:
            text = place.sub(_host, text)
        text = PRIVATE_DOMAIN.sub(HOST, self._hosts().sub(HOST, MAIL.sub(_mail, text)))
        text = IPV6.sub(_address, IPV4.sub(_address, text))
        text = ABSOLUTE.sub(_path, HOME.sub("~", text))
        return self._user().sub(USER, USER_PLACES.sub(_named_user, text))

    def lines(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the redacted lines of a log; private keys are removed as a whole."""
        inside = False
        for line in lines:
            inside = inside or bool(KEY_BEGINS.search(line))
            yield f"{SECRET}\n" if inside else self.text(line)
            inside = inside and not KEY_ENDS.search(line)

    def document(self, value: Any, name: str = "") -> Any:
        """Return a JSON document of the same shape, with strings redacted; numbers and names of fields stay."""
        if isinstance(value, dict) and name == "environment":
            return {key: self.document(inner, str(key)) for key, inner in masked_environment(value).items()}
        if isinstance(value, dict) and name == "software":  # four numbers are a version there
            return {key: self.secrets(inner) if isinstance(inner, str) else inner for key, inner in value.items()}
        if isinstance(value, dict):
            return {key: self.document(inner, str(key)) for key, inner in value.items()}
        if isinstance(value, list):
            flags = ["", *(one if isinstance(one, str) and one.startswith("-") else "" for one in value)]
            return [self.document(inner, flag.lstrip("-")) for inner, flag in zip(value, flags, strict=False)]
        if not isinstance(value, str):
            return value
        if name in {"driver", "run_id", "sha256"}:
            return self.secrets(value)
        return SECRET if value and SECRET_NAME.fullmatch(name) else self.text(value)

    def _hosts(self) -> re.Pattern[str]:
        if self._names is None:
            self._names = _any_of(self.hosts, r"(?<![\w.-]){}(?![\w-])")
        return self._names

    def _user(self) -> re.Pattern[str]:
        if self._people is None:
            plain = {user for user in self.users if len(user) < SHORT_USER or user.lower() in ORDINARY}
            in_paths = _any_of(plain, r"(?<=/){0}(?=/)").pattern
            anywhere = _any_of(self.users - plain, r"(?<![\w.@-]){0}(?![\w-])").pattern
            self._people = re.compile(f"{in_paths}|{anywhere}")
        return self._people


@cache
def known_tokens() -> tuple[tuple[tuple[str, ...], re.Pattern[str]], ...]:
    """Return the rules for tokens that are known by their form: words of which a text must hold one, and the pattern."""
    import yaml

    text = (Path(__file__).parent.parent / "data" / "secrets.yaml").read_text(encoding="utf8")
    rules = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tuple((tuple(words), re.compile(pattern)) for words, pattern in rules.values())


def masked_environment(environment: Mapping[str, Any], *, marked: bool = False) -> dict[str, Any]:
    """Return the variables of an environment without the values of those that we do not know.

    Marked, each keeps a short digest in place of its value, which shows that two are equal.
    """
    found = {}
    for name, value in environment.items():
        known = KNOWN_VARIABLE.fullmatch(name) and not SECRET_NAME.fullmatch(name)
        if known or not isinstance(value, str) or (marked and value.startswith(f"{UNKNOWN[:-1]} ")):
            found[name] = value
        else:
            found[name] = marked_value(name, value) if marked else UNKNOWN
    return found


def marked_value(name: str, value: str) -> str:
    """Return what stands for the value of a variable: a short digest, which shows that two are equal."""
    digest = hashlib.sha256(f"{name}={value}".encode("utf8", "surrogateescape")).hexdigest()[:8]
    return f"{UNKNOWN[:-1]} {digest}]"


def masked_command(words: Iterable[str]) -> tuple[str, ...]:
    """Return a command line without secrets and without the values of environment variables that it sets."""
    redactor = Redactor()
    return tuple(redactor.document([ENVIRONMENT_SETTING.sub(_setting, word) for word in words]))


def redactor_of_this_machine() -> Redactor:
    """Return a redactor that already knows this host and this user."""
    name = socket.gethostname()  # not getfqdn, which waits for a name server
    try:
        users = {getpass.getuser()} - NO_USER
    except (OSError, KeyError):  # an account without a name
        users = set()
    return Redactor(hosts={host for host in (name, name.split(".")[0]) if distinctive(host)}, users=users)


def distinctive(host: str) -> bool:
    """Whether a word is so clearly a host's name that it can be redacted anywhere."""
    return len(host) > 2 and host.lower() not in NO_HOST and bool(re.search(r"[A-Za-z].*[\d.-]|\d.*[A-Za-z]", host))


def _any_of(words: Iterable[str], around: str) -> re.Pattern[str]:
    """Return a pattern of any word, longest first so that no prefix of a name cuts it; without words it never matches."""
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    choice = "(?:" + "|".join(map(re.escape, longest_first)) + ")"
    return re.compile(around.format(choice) if longest_first else r"(?!)")


def _shortened(line: str) -> str:
    rest = len(line) - LONGEST_LINE
    return line if rest <= 0 else f"{line[:LONGEST_LINE]}[{rest:,} characters left out]" + "\n" * line.endswith("\n")


def _token(match: re.Match[str]) -> str:
    token = match[1] if match.re.groups and match[1] else match[0]
    return match[0].replace(token, SECRET)


def _setting(match: re.Match[str]) -> str:
    return match[1] + str(masked_environment({match[2]: match[3]})[match[2]])


def _mail(match: re.Match[str]) -> str:
    return EMAIL if match[1] else f"{USER}@{HOST}"


def _address(match: re.Match[str]) -> str:
    """Return the mark of an address; versions, the loopback and the address of every interface stay."""
    try:
        address = ipaddress.ip_address(match[0])
    except ValueError:
        return match[0]
    plain = (
        address.is_loopback or address.is_unspecified or VERSION.search(match.string[max(0, match.start() - 40) : match.start()])
    )
    return match[0] if plain else ADDRESS


def _path(match: re.Match[str]) -> str:
    """Return a path without its folders, but with those inside Python's packages."""
    inside = PACKAGES.search(match[0])
    return f"{PATH}/{inside[0] if inside else match[0].rstrip('/').rpartition('/')[2]}"


def _named_user(match: re.Match[str]) -> str:
    return match[0] if match[2].lower() in NO_USER else match[1] + USER


def _unless_plain(match: re.Match[str]) -> str:
    value = match[0][len(match[1]) :]
    kept = NO_SECRET.fullmatch(value) and not re.search("pass|pwd|secret", match[1], re.I)
    return match[0] if kept else match[1] + SECRET


def _host(match: re.Match[str]) -> str:
    plain = match[2].lower() in NO_HOST or match[2].isdigit()
    return match[0] if plain else match[1] + HOST
