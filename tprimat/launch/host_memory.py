"""Whether the kernel killed for memory: SIGKILL leaves no word in the log, but the kernel counts."""

import re
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def out_of_memory_kills() -> int | None:
    """Kills so far, in our cgroup (memory.events of cgroups v2) and on the machine (/proc/vmstat); None where neither is told."""
    counts = [count for path in counters() if (count := read_count(path)) is not None]
    return sum(counts) if counts else None


def counters() -> list[Path]:
    """The files that may have a count."""
    files = [Path("/proc/vmstat"), CGROUPS / "memory.events"]
    try:
        group = Path("/proc/self/cgroup").read_text(encoding="utf8")
    except OSError:
        return files
    own = re.search(r"^0::/(.+)$", group, re.MULTILINE)
    return [*files, CGROUPS / own[1] / "memory.events"] if own else files


def read_count(path: Path) -> int | None:
    """The count in one file."""
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(encoding="utf8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return int(found[1]) if found else None
