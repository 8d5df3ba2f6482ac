"""Which parts of a record may leave this machine: text of named fields; of sentences numbers and the words of our own sources.

Archives, report pages, exports and benchmark files are written from what `shareable` returns. Text of any other field stays here.
"""

import re
import socket
from collections.abc import Callable, Iterable, Mapping, Set
from functools import lru_cache
from pathlib import Path
from typing import Any

from tprimat.core.rows import DATA, document
from tprimat.records import environment
from tprimat.records.environment import PUNCTUATION, SECRET, SECRET_NAME, digest_of, is_plain, plain_or_digest

LEFT_HERE = MASKED, PLACE, ADDRESS, LEFT_OUT = "[secret]", "[path]", "[address]", "[left out]"

# Secrets in command lines, sentences and URLs, by what stands before them.

VALUE = r"""(?!["']?\[(?:secret|value))(?:"[^"\n]*"|'[^'\n]*'|[^\s"',;&)\]}]+)"""
TABLE: Mapping[str, Any] = document(DATA / "sharing.yaml")
SECRETS = [
    re.compile(pattern.replace("SECRET", SECRET.replace(r"\w*", "")).replace("VALUE", VALUE)) for pattern in TABLE["secrets"]
]
SETTING = re.compile(r"(\benvironment\.(\w+)=)(.*)", re.S)
"""`--set platform_optimizations.nvidia.environment.NAME=VALUE`."""

# What a sentence may hold where it leaves: numbers and our own words. Everything else stays here, whatever it is.

WORD = re.compile(r"""[^\s"'`,;()\[\]{}<>|=]+""")
URL = re.compile(r"\b[a-z][a-z0-9+.-]{0,20}://(?!\[secret)(?P<host>[\w.-]*)(?P<rest>[^\s\"'`<>]*)", re.I)
KNOWN_HOSTS = re.compile(rf"(?:[\w-]+\.)*(?:{'|'.join(map(re.escape, TABLE['known_hosts']))})")
SHORT_FLAG = re.compile(rf"((?<![\w-])-[A-Za-z]\s+|(?<![\w-])-p(?=\w))(?!-|\d+\b){VALUE}")


NAME_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\W\d_]+")
"""Of a name in camel case: Out, Of, Memory, Error."""
WITH_NUMBER = re.compile(r"\d{1,20}|0x[\da-f]{1,8}|[a-z]{0,12}\d{1,8}[a-z]{0,12}|[^\W\d_]{1,40}", re.I)


@lru_cache(maxsize=1)
def our_words() -> frozenset[str]:
    """Return the words of the sources and data of this program, in small letters: what anybody may read."""
    package = Path(__file__).parent.parent
    files = (*package.rglob("*.py"), *package.glob("data/*.yaml"))
    names = {name for file in files for name in re.findall(r"[^\W_]+", file.read_text(encoding="utf8"))}
    return frozenset(part.lower() for name in names for part in (name, *NAME_WORD.findall(name)))


def is_ours(word: str, own: Set[str] = frozenset()) -> bool:
    """Whether each part of a word is a number or among `our_words` or the run's, whole or but for its digits or by camel case."""
    parts = filter(None, PUNCTUATION.split(word)) if is_plain(word) else [" "]
    return all(
        part.lower() in own
        or part.lower() in our_words()
        or (WITH_NUMBER.fullmatch(part) and our_words().issuperset(map(str.lower, NAME_WORD.findall(part))))
        for part in parts
    )


@lru_cache(maxsize=4096)
def without_secrets(text: str) -> str:
    """Return a command line or a sentence without the secrets that their names, or forms that are known, give away."""
    for pattern in SECRETS:
        text = pattern.sub(lambda match: "".join(match.groups()) + MASKED, text)
    return text


def masked_name(name: str) -> str:
    """Return a name without secrets; a digest tells it from other names of which as much is left."""
    masked = without_secrets(name)
    return name if masked == name else f"{masked} {digest_of('', name)[-5:-1]}"


def masked_texts(value: Any, name: str = "") -> Any:
    """Return the document of a record without secrets in its texts, as it is shown here."""
    return _with_texts(value, name, lambda key, text: masked_name(text) if key in NAMES else without_secrets(text))


def masked_command(words: Iterable[str]) -> tuple[str, ...]:
    """Return a command line without secrets, and with digests in place of environment variables that no library reads."""
    masked, flag = [], ""
    for word in words:
        secret = flag.startswith("-") and not word.startswith("-") and SECRET_NAME.fullmatch(flag.lstrip("-"))
        plain = SETTING.sub(lambda match: match[1] + environment.masked_environment({match[2]: match[3]})[match[2]], word)
        masked.append(MASKED if secret else without_secrets(plain))
        flag = word
    return tuple(masked)


# Records.

NAMES, SENTENCES, VARIABLES, KEYS_OF_ANY_NAME = (
    frozenset(TABLE[section]) for section in ("names", "sentences", "variables", "keys_of_any_name")
)

PART = r"""[^\s/"'`:,;()\[\]{}<>|=\\]+"""
HOME = re.compile(r"/(?:home|Users)/[\w.-]+|/root(?![\w.-])")
FOLDERS = re.compile(rf"(?<![\w./~\]\[\\-])~?/(?!(?:usr|opt|dev|proc|sys|lib|lib64|etc|bin|sbin)/)(?:{PART}/)+")
"""Of an absolute path, except those of the system."""
IP = re.compile(
    r"(?<![\w.])(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}(?![\w.]\w)"
    r"|(?<![\w:])(?:(?:[0-9a-f]{1,4}:){4,7}[0-9a-f]{1,4}|[0-9a-f]{1,4}::(?:[0-9a-f]{1,4}:?)*)(?!\w)"
)
NO_HOST = {"", "localhost"}

Hosts = Mapping[str, str]
"""Name of a machine -> what stands for it; the run's strategy and model stand for themselves, since their fields leave, too."""


def shareable(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a record as it may leave: of the same shape, with numbers as they are."""
    run = record.get("run", record)
    own = {name: name for name in (run.get("strategy"), run.get("model")) if name and masked_name(name) == name}
    nodes = {node["host"]: f"node-{rank}" for rank, node in enumerate(run.get("nodes") or ())}
    hosts = own | {socket.gethostname(): "[host]"} | nodes
    return {name: _shared(value, name, hosts) for name, value in record.items()}


def shareable_text(text: str, hosts: Hosts | None = None) -> str:
    """Return the words and numbers of a sentence or a command line that may leave, without secrets, folders and machines."""
    text = without_secrets(text)
    text = URL.sub(lambda match: match[0].partition("?")[0] if KNOWN_HOSTS.fullmatch(match["host"]) else ADDRESS, text)
    plain_flags = TABLE["flags_with_plain_values"]
    text = SHORT_FLAG.sub(lambda match: match[0] if match[1].strip() in plain_flags else match[1] + MASKED, text)
    text = IP.sub(ADDRESS, _without_folders(text))
    for host, instead in ({socket.gethostname(): "[host]"} if hosts is None else hosts).items():
        if host not in NO_HOST:
            text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", instead, text)
    own = frozenset(part.lower() for name, kept in (hosts or {}).items() if name == kept for part in PUNCTUATION.split(name))
    return WORD.sub(lambda match: match[0] if is_ours(match[0], own) else LEFT_OUT, text)


def _without_folders(text: str) -> str:
    return FOLDERS.sub(f"{PLACE}/", HOME.sub("~", text))


def _shared(value: Any, name: str, hosts: Hosts) -> Any:
    if name == "engine_options":
        # Names are the engine's own: text that is no plain word stays here.
        return _with_texts(value, "", lambda key, text: MASKED if SECRET_NAME.fullmatch(key) else plain_or_digest(key, text))
    if name == "command":
        return [shareable_text(word, hosts) for word in masked_command(value)]
    if isinstance(value, Mapping):
        if name in VARIABLES:
            return environment.tuning_variables(value)
        return {key: _shared(inner, name if name in KEYS_OF_ANY_NAME else key, hosts) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shared(inner, name, hosts) for inner in value]
    if not isinstance(value, str):
        return value
    if name in SENTENCES:
        return shareable_text(value, hosts)
    if name in NAMES:
        return _without_folders(masked_name(value))
    return hosts[value] if name == "host" else Path(value).name if name == "path" else LEFT_OUT


def _with_texts(value: Any, name: str, change: Callable[[str, str], str]) -> Any:
    """Return a document with each text changed, by the key above it."""
    if isinstance(value, Mapping):
        return {key: _with_texts(inner, key, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(inner, name, change) for inner in value]
    return change(name, value) if isinstance(value, str) else value
