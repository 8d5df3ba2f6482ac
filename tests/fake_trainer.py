"""A process that behaves like a training worker, for the tests of the launcher. It does what its arguments say, in their order.

    python tests/fake_trainer.py print "hello" steps 5 exit 3
    python tests/fake_trainer.py replay tests/logs/some.log

print TEXT           a line (\\n, \\r and \\xNN escapes are understood), no line end of its own
line TEXT            the same with a line end
replay FILE          the bytes of a log
steps N              append N steps of $FAKE_TOKENS tokens to $FAKE_STEPS as a worker does, going on where the last ones ended
losses A,B,...       append a step for each loss; nan is written as null and not finite
pace SECONDS         the time that a step takes from now on, slept and reported
ignore NAME          ignore a signal, such as SIGTERM
note NAME FILE       survive a signal, and create a file when it arrives
faulthandler NAME    print all stacks on a signal
records FILE         on SIGUSR2, write the flight record of rank $RANK, which is the one of that number in FILE
spawn detached|child start a descendant that sleeps: in a session of its own, forked twice, or as a plain child
run-record FILE      copy a run.json into $FAKE_RUN
sleep SECONDS        sleep
await FILE N         wait until a file has N lines
raise KIND TEXT      end with a traceback
kill NAME            end by a signal
exit CODE            end
"""

import faulthandler
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

SLEEP = [sys.executable, "-S", "-c", "import signal, time; signal.signal(signal.SIGHUP, signal.SIG_IGN); time.sleep(600)"]
state = {"step": 0, "pace": 0.0}


def step_line(loss):
    state["step"] += 1
    finite = not math.isnan(loss)
    step = {
        "step": state["step"],
        "step_seconds": state["pace"] or 0.001,
        "tokens": int(os.environ.get("FAKE_TOKENS", "1000")),
        "finite": finite,
    }
    step["loss"] = loss if finite else None
    return json.dumps(step) + "\n"


def write_steps(losses):
    """All at once unless they take time, so that nobody sees a pause between them on a busy machine."""
    with Path(os.environ["FAKE_STEPS"]).open("a") as file:
        for loss in losses:
            time.sleep(state["pace"])
            file.write(step_line(loss))
            if state["pace"]:
                file.flush()


def await_lines(path, count):
    while not Path(path).exists() or Path(path).read_text().count("\n") < int(count):
        time.sleep(0.01)


def replay(path):
    sys.stdout.buffer.write(Path(path).read_bytes())
    sys.stdout.flush()


def spawn(kind):
    if kind == "child":
        subprocess.Popen(SLEEP)
    elif os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(SLEEP[0], SLEEP)
        os._exit(0)
    else:
        os.wait()


def answer_with(path):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    rank, folder = int(os.environ["RANK"]), Path(os.environ["FAKE_STEPS"]).parent / "flight-recorder"

    def answer():
        signal.sigwait({signal.SIGUSR2})
        folder.mkdir()
        (folder / "part").write_text(json.dumps(json.loads(Path(path).read_text())[rank]))
        (folder / "part").rename(folder / f"rank-{rank}.json")

    threading.Thread(target=answer, daemon=True).start()


def emit(text, end=b""):
    os.write(1, text.encode("latin1").decode("unicode_escape").encode("latin1") + end)


def fail(kind, text):
    raise {"RuntimeError": RuntimeError, "ModuleNotFoundError": ModuleNotFoundError, "OSError": OSError}[kind](text)


WORDS = {
    "print": (1, emit),
    "line": (1, lambda text: emit(text, b"\n")),
    "replay": (1, replay),
    "steps": (1, lambda count: write_steps([5.0] * int(count))),
    "losses": (1, lambda losses: write_steps(map(float, losses.split(",")))),
    "pace": (1, lambda seconds: state.update(pace=float(seconds))),
    "ignore": (1, lambda name: signal.signal(getattr(signal, name), signal.SIG_IGN)),
    "note": (2, lambda name, path: signal.signal(getattr(signal, name), lambda *_: Path(path).touch())),
    "await": (2, await_lines),
    "faulthandler": (1, lambda name: faulthandler.register(getattr(signal, name), all_threads=True)),
    "records": (1, answer_with),
    "spawn": (1, spawn),
    "run-record": (1, lambda path: shutil.copy(path, os.environ["FAKE_RUN"])),
    "sleep": (1, lambda seconds: time.sleep(float(seconds))),
    "raise": (2, fail),
    "kill": (1, lambda name: os.kill(os.getpid(), getattr(signal, name))),
    "exit": (1, lambda code: sys.exit(int(code))),
}


def main(words):
    while words:
        count, do = WORDS[words[0]]
        do(*words[1 : 1 + count])
        words = words[1 + count :]


if __name__ == "__main__":
    main(sys.argv[1:])
