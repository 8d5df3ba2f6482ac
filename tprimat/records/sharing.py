"""What of a record may leave this machine: text of named fields, and of sentences and commands plain words and numbers.

Archives, report pages, exports and benchmark files are written from what `shareable` returns. Text of any other field stays here.
"""

import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tprimat.records.environment import SECRET, SECRET_NAME, masked_environment, plain_or_digest, tuning_variables

MASKED, PLACE, ADDRESS, LEFT_OUT = "[secret]", "[path]", "[address]", "[left out]"

# Secrets in command lines, sentences and URLs, by what stands before them.

VALUE = r"""(?!["']?\[(?:secret|value))(?:"[^"\n]*"|'[^'\n]*'|[^\s"',;&)\]}]+)"""
SECRETS = (
    (re.compile(r"-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|\Z)", re.S), MASKED),
    # https://user:password@host, https://token@host
    (re.compile(r"(?<=://)[^/\s\"'?#]+@"), f"{MASKED}@"),
    (re.compile(r"(https?://(?:hooks\.|[\w.-]+/(?:api/)?(?:web)?hooks?/))[^\s\"']+", re.I), rf"\1{MASKED}"),
    (re.compile(r"(\b(?:authorization|cookie)[\"']?\s*[:=]\s*)[^\n]+", re.I), rf"\1{MASKED}"),
    (re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.I), rf"\1 {MASKED}"),
    (
        re.compile(rf"(\b(?:sshpass|login|curl|wget|mysql\w*|psql|redis-cli|kinit)\b[^\n|;]*?\s-[a-zA-Z]\s*){VALUE}"),
        rf"\1{MASKED}",
    ),
    # Hugging Face, GitHub, GitLab, OpenAI, NVIDIA, Weights & Biases, Slack, AWS
    (re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|nvapi-|wandb_v\d_|xox[abprs]-|AKIA|ASIA)[\w-]{16,}"), MASKED),
    # --token X; token=X, key=X, ?sig=X; "password": X
    (re.compile(rf"((?<![\w-])--?(?:[\w.-]*[_.-])?(?:{SECRET}|key|pass|pwd|auth)\s+){VALUE}", re.I), rf"\1{MASKED}"),
    (re.compile(rf"((?:{SECRET}|key|sig|signature|[_-](?:auth|pass)|pwd)=){VALUE}", re.I), rf"\1{MASKED}"),
    (re.compile(rf"(\b(?:{SECRET}|key|otp)\s+(?:is\s+)?[\"']?)(?=[\w.-]*\d)(?=[\w.-]*[a-z])[\w.-]+", re.I), rf"\1{MASKED}"),
    (re.compile(rf"((?:{SECRET}|[_-]key|client-key-data)[\"']?\s*[:=]\s*){VALUE}", re.I), rf"\1{MASKED}"),
)
SETTING = re.compile(r"(\benvironment\.(\w+)=)(.*)", re.S)
"""`--set platform_optimizations.nvidia.environment.NAME=VALUE`."""

# What a sentence may hold where it leaves: plain words and numbers. Everything else stays here, whatever it is.

WORD = re.compile(r"""[^\s"'`,;()\[\]{}<>|]+""")
LONGEST_WORD = 160
PLAIN_PART = re.compile(
    r"\d{1,20}|[^\W\d_]{1,40}|[a-z]{0,12}\d{1,8}[a-z]{0,12}|(?:[a-z]{1,4}\d{1,3}){1,6}|fp8e\dm\d\w{0,4}|e\dm\d[a-z]{0,4}", re.I
)
"""Of a word, between its punctuation: 4096, OutOfMemoryError, H100, 80GB, tp2pp4, e4m3fn."""
PUNCTUATION = re.compile(r"[-_.:/=+*%~^#&!?…–×·°$]")
URL = re.compile(r"\b[a-z][a-z0-9+.-]*://(?!\[secret)(?P<host>[\w.-]*)(?P<rest>[^\s\"'`<>]*)", re.I)
KNOWN_HOSTS = re.compile(r"(?:[\w-]+\.)*(?:huggingface\.co|github\.com|pytorch\.org|nvidia\.com|amd\.com|arxiv\.org|pypi\.org)")
SHORT_FLAG = re.compile(rf"((?<![\w-])-[A-Za-z]\s+|(?<![\w-])-p(?=\w))(?!-|\d+\b){VALUE}")
FLAGS_WITH_PLAIN_VALUES = ("-m ", "-n ", "-N ", "-q ", "-d ", "-t ", "-i ", "-c ", "-T ")


def without_secrets(text: str) -> str:
    """Return a command line or a sentence without the secrets that their names, or forms that are known, give away."""
    for pattern, instead in SECRETS:
        text = pattern.sub(instead, text)
    return text


def masked_command(words: Iterable[str]) -> tuple[str, ...]:
    """Return a command line without secrets, and with digests in place of environment variables that no library reads."""
    masked, flag = [], ""
    for word in words:
        secret = flag.startswith("-") and not word.startswith("-") and SECRET_NAME.fullmatch(flag.lstrip("-"))
        masked.append(MASKED if secret else without_secrets(SETTING.sub(_setting, word)))
        flag = word
    return tuple(masked)


def _setting(match: re.Match[str]) -> str:
    return match[1] + masked_environment({match[2]: match[3]})[match[2]]


# Records.

NAMES = frozenset(
    re.findall(
        r"\w+",
        """
        run_id model size name norm position router_score source strategy engine matmul_dtype recompute recompute_modules routing
        expert_capacity platform accelerator driver processor job started_at ended_at clock outcome documents parameter_dtype
        output_layer_dtype attention_dtype wider_parts offloaded
        fp8_scaling gradient_dtype optimizer_states attention optimizer data
        first_sequence grades moment rates sha256 dialect kind variant dtype throttle_reasons rule flops_convention software
        device_name software_stack framework strategy_name precision micro_batch_size_asked
        """,
    )
)
"""Fields whose text leaves as it is, but for the folders of a path."""
KEYS_OF_ANY_NAME = frozenset({"software", "grades"})
SENTENCES = frozenset({"cause", "hint", "error", "mismatches", "notes", "subjects", "mfu_absent_because", "not_trained"})
VARIABLES = frozenset({"environment", "other_variables"})

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
"""Name of a machine -> what stands for it."""


def shareable(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a record as it may leave: of the same shape, with numbers as they are."""
    nodes = document.get("run", document).get("nodes") or ()
    hosts = {socket.gethostname(): "[host]"} | {node["host"]: f"node-{rank}" for rank, node in enumerate(nodes)}
    return {name: _shared(value, name, hosts) for name, value in document.items()}


def shareable_text(text: str, hosts: Hosts | None = None) -> str:
    """Return the plain words and numbers of a sentence or a command line, without secrets, folders, addresses and machines."""
    text = URL.sub(_without_host, without_secrets(text))
    text = SHORT_FLAG.sub(lambda match: match[0] if match[1] in FLAGS_WITH_PLAIN_VALUES else match[1] + MASKED, text)
    text = IP.sub(ADDRESS, _without_folders(text))
    for host, instead in ({socket.gethostname(): "[host]"} if hosts is None else hosts).items():
        if host not in NO_HOST:
            text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", instead, text)
    return WORD.sub(lambda match: match[0] if is_plain(match[0]) else LEFT_OUT, text)


def is_plain(word: str) -> bool:
    """Whether a word is one of letters, numbers and punctuation, and none that a program made up."""
    return len(word) <= LONGEST_WORD and all(PLAIN_PART.fullmatch(part) for part in PUNCTUATION.split(word) if part)


def _without_host(match: re.Match[str]) -> str:
    return match[0].partition("?")[0] if KNOWN_HOSTS.fullmatch(match["host"]) else ADDRESS


def _without_folders(text: str) -> str:
    return FOLDERS.sub(f"{PLACE}/", HOME.sub("~", text))


def _shared(value: Any, name: str, hosts: Hosts) -> Any:
    if name == "engine_options":
        return _options(value)
    if name == "command":
        return [shareable_text(word, hosts) for word in masked_command(value)]
    if isinstance(value, Mapping):
        if name in VARIABLES:
            return tuning_variables(value)
        return {key: _shared(inner, name if name in KEYS_OF_ANY_NAME else key, hosts) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shared(inner, name, hosts) for inner in value]
    if not isinstance(value, str):
        return value
    if name in SENTENCES:
        return shareable_text(value, hosts)
    if name in NAMES:
        return _without_folders(without_secrets(value))
    return hosts[value] if name == "host" else Path(value).name if name == "path" else LEFT_OUT


def _options(value: Any, name: str = "") -> Any:
    """Return the options of an engine, whose names are its own: text that is no plain word stays here."""
    if isinstance(value, Mapping):
        return {key: _options(inner, key) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_options(inner, name) for inner in value]
    if not isinstance(value, str):
        return value
    return MASKED if SECRET_NAME.fullmatch(name) else plain_or_digest(name, value)
