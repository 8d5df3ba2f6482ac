"""Where the ranks of a hung run are: the collective that one is missing from, and the stacks of all, before they are stopped.

`train/worker.py` writes what torch's flight recorder holds on each rank. gloo records only collectives, NCCL also messages
between two ranks.
"""

import json
import re
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tprimat.launch import process_tree
from tprimat.launch.process_tree import in_signal_set, stat_of

FOLDER = "flight-recorder"
"""As tprimat/train/worker.py names it, which is not imported: launchers stay free of torch."""
ANSWER_SECONDS = 3.0
"""A rank that has not answered by then never will: something holds Python's lock."""
WAITING_SECONDS = 1.0
"""A rank waits in a collective that it entered longer ago than this. Others may be on their way."""
MOST_SENTENCES = 2
"""What a deadlock of two groups needs."""
MOST_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """How far one rank has come in the collectives of one process group."""

    group: str
    """torch's name of the group, which is the same on all its ranks."""
    description: str
    """What the program calls it, such as 'default_pg' or 'TENSOR_MODEL_PARALLEL_GROUP'."""
    backend: str
    """'nccl' or 'gloo', each of which counts by itself; empty where torch has forgotten all but the count."""
    entered: int
    """Number of the last collective that this rank has entered; they count from 1."""
    waits_in: int | None = None
    """Number of the collective that it waits in; None: it waits in none."""
    operation: str = ""
    """Of that collective, such as 'all_reduce'."""
    members: tuple[int, ...] = ()
    """The ranks of the group; empty where torch does not tell."""

    @property
    def name(self) -> str:
        """Return 'group default_pg', or the ranks of a group that the program has not named."""
        if self.members and self.description in {"", "undefined"}:
            return f"the group of {names(self.members).lower()}"
        return f"group {self.description or self.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What the flight recorder of one rank says."""

    rank: int
    places: tuple[GroupPlace, ...] | None
    """None: the rank did not answer."""
    waits_for_one: bool = False
    """Whether it waits for a message of a single other rank."""

    @property
    def waits(self) -> bool:
        """Whether it waits for anyone."""
        return self.waits_for_one or any(place.waits_in is not None for place in self.places or ())

    def entered_in(self, group: GroupPlace) -> int:
        """Return the number of the last collective of a group that the rank has entered."""
        same = (
            one.entered for one in self.places or () if (one.group, one.backend or group.backend) == (group.group, group.backend)
        )
        return max(same, default=0)


def take_records(ranks: Mapping[int, int], folder: Path) -> list[RankRecord]:
    """Let those ranks of this node that wait for SIGUSR2 write what their flight recorders hold into the run's folder here."""
    # Others could die of the signal.
    answering = {rank: pid for rank, pid in ranks.items() if in_signal_set("SigBlk", pid, signal.SIGUSR2)}
    files = {rank: folder / FOLDER / f"rank-{rank}.json" for rank in answering}
    for path in files.values():
        path.unlink(missing_ok=True)  # of an earlier start in this folder
    able = {pid: rank for rank, pid in answering.items() if stat_of(pid)[0] not in STATES}
    process_tree.send(set(able), signal.SIGUSR2)
    ends = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < ends and not all(files[rank].exists() for rank in able.values()):
        time.sleep(0.02)
    return [read_record(path, rank) for rank, path in files.items()]


def read_record(path: Path, rank: int) -> RankRecord:
    """Read the file of one rank; one that is missing, or not in torch's current format, gives None."""
    try:
        return parse_record(json.loads(path.read_text(encoding="utf8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return RankRecord(rank=rank, places=None)


def parse_record(document: dict[str, Any]) -> RankRecord:
    """Return what the file of a rank says; an error of any kind means that torch has changed the fields that are read here."""
    places: dict[tuple[str, str], GroupPlace] = {}
    waits_for_one = False
    for recorder in document["recorders"]:
        # torch forgets the oldest entries, but not how many there were in a group.
        entered = {str(name): int(status["last_enqueued_collective"]) for name, status in recorder.get("pg_status", {}).items()}
        ranks = {str(name): json.loads(config["ranks"]) for name, config in recorder.get("pg_config", {}).items()}
        calls: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for entry in recorder.get("entries", ()):
            if entry["is_p2p"]:
                waits_for_one = waits_for_one or waits(entry, document["taken_ns"])
            else:
                calls.setdefault((str(entry["process_group"][0]), entry["profiling_name"].partition(":")[0]), []).append(entry)
        for (name, backend), entries in calls.items():
            numbered = {int(entry["collective_seq_id"]): entry for entry in reversed(entries)}
            number = min((number for number, entry in numbered.items() if waits(entry, document["taken_ns"])), default=None)
            members = document["groups"].get(name) or ranks.get(name) or ()
            places[name, backend] = GroupPlace(
                group=name,
                description=str(entries[-1]["process_group"][1]),
                backend=backend,
                entered=max(entered.get(name, 0), *numbered),
                waits_in=number,
                operation="" if number is None else numbered[number]["profiling_name"].partition(":")[2],
                members=tuple(map(int, members)),
            )
        for name in entered.keys() - {name for name, _ in calls}:
            places[name, ""] = GroupPlace(group=name, description="", backend="", entered=entered[name])
    return RankRecord(rank=int(document["rank"]), places=tuple(places.values()), waits_for_one=waits_for_one)


def waits(entry: dict[str, Any], now_ns: int) -> bool:
    """Return whether a rank has been in an operation for so long that it waits."""
    ended = entry["retired"] or entry["state"] == "completed"
    return not ended and now_ns - int(entry["time_created_ns"]) > WAITING_SECONDS * 1e9


def missing_ranks(records: Sequence[RankRecord]) -> str | None:
    """Return a sentence on who is missing from which collective; None where the records do not show it.

    Where several groups wait for each other, the ranks named are those that wait for nobody; in a deadlock, all are named.
    """
    answers = {record.rank: record for record in records if record.places is not None}
    waits: dict[tuple[Any, ...], tuple[GroupPlace, list[int]]] = {}
    for rank, record in answers.items():
        for place in record.places or ():
            if place.waits_in is not None:
                waits.setdefault((place.group, place.backend, place.waits_in, place.operation), (place, []))[1].append(rank)
    busy = {rank for rank, record in answers.items() if record.waits}
    absent: list[tuple[set[int], str]] = []
    silent: list[str] = []
    for place, waiting in waits.values():
        members = {rank: record for rank, record in answers.items() if rank in place.members}
        late = {rank for rank, record in members.items() if record.entered_in(place) < (place.waits_in or 0)}
        where = f"{place.operation} number {place.waits_in} of {place.name}, in which {names(waiting).lower()} wait"
        where += "s" * (len(waiting) == 1)
        if late:
            absent.append((late, f"{names(late)} {'has' if len(late) == 1 else 'have'} not entered {where}."))
        if mute := set(place.members) - answers.keys() & {record.rank for record in records}:
            silent.append(f"{names(mute)} {'does' if len(mute) == 1 else 'do'} not answer, of {where}.")
    first = [sentence for late, sentence in absent if not busy & late] or [sentence for _, sentence in absent] or silent
    return " ".join(first[:MOST_SENTENCES]) or None


def names(ranks: Collection[int]) -> str:
    """Return 'Rank 3', 'Ranks 0, 2 and 3', or '64 ranks'."""
    if len(ranks) > MOST_NAMED:
        return f"{len(ranks)} ranks"
    *others, last = map(str, sorted(ranks))
    return f"Ranks {', '.join(others)} and {last}" if others else f"Rank {last}"


FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
THREAD = re.compile(r"^(?:Current thread|Thread) ", re.MULTILINE)
STATES = {"T": "is stopped (SIGSTOP)", "D": "waits in the kernel, for a disk or a driver"}
"""Of a process, proc(5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One rank of a run."""

    pid: int
    rank: int
    state: str
    """Its letter in proc(5)."""
    text: str
    """What faulthandler printed; empty where it did not answer."""

    @property
    def place(self) -> tuple[str, str, str] | None:
        """Function, file and line of its main thread, which faulthandler prints last."""
        match = FRAME.search(THREAD.split(self.text)[-1])
        return (match["function"], match["file"], match["line"]) if match else None


def take_stacks(ranks: Mapping[int, int], listen: Callable[[], str]) -> list[Stack]:
    """Return the Python stacks of ranks, which `listen` reads after SIGUSR1: one after the other, and only if it handles that."""
    stacks = []
    for rank, pid in ranks.items():
        state, text = stat_of(pid)[0], ""
        if state not in STATES and in_signal_set("SigCgt", pid, signal.SIGUSR1):
            process_tree.send({pid}, signal.SIGUSR1)
            text = listen()
        stacks.append(Stack(pid=pid, rank=rank, state=state, text=text))
    return stacks


def save(stacks: Sequence[Stack], path: Path) -> str:
    """Write the stacks into a file, and return a sentence on it; empty where there is none."""
    lines = (f"Rank {one.rank}, process {one.pid}: {STATES.get(one.state, 'stack')}\n{one.text}" for one in stacks if one.text)
    if not (text := "\n".join(lines)):
        return ""
    try:
        path.write_text(text, encoding="utf8")
    except OSError as error:
        return f"The stacks cannot be written to {path}: {error.strerror or error}."
    return f"The stacks of {len(stacks)} ranks are in {path}."


def culprit(stacks: Sequence[Stack]) -> str | None:
    """Return one sentence on the rank that keeps the others waiting; None where the stacks do not show one."""
    for one in stacks:
        if one.state in STATES:
            return f"Rank {one.rank} (process {one.pid}) {STATES[one.state]}."
    places = {one.rank: one.place for one in stacks if one.place}
    elsewhere = [rank for rank, (_, file, _) in places.items() if "torch/distributed" not in file]
    if len(elsewhere) != 1 or len(places) < max(2, len(stacks)):
        return None
    function, file, line = places[elsewhere[0]]
    return f"Rank {elsewhere[0]} is in {function} ({Path(file).name}:{line}), where no other rank is."
