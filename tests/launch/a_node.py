"""The launcher of one node, whose ranks are the fake trainer: python a_node.py FLAGS_OF_BENCHMARK...

FAKE_WORDS says what the trainer of this node does (JSON): a list of words, or one for each strategy or micro-batch size.
FAKE_VERSION pretends another version of TPrimat.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from tprimat.cli.main import main  # noqa: E402
from tprimat.engines.base import Command  # noqa: E402
from tprimat.launch import agreement  # noqa: E402
from tprimat.records import environment  # noqa: E402
from tprimat.runner import nodes, run, submit  # noqa: E402

TRAINER = (sys.executable, "-S", str(ROOT / "tests" / "fake_trainer.py"))


def command_on(plan, place):
    words = json.loads(os.environ["FAKE_WORDS"])
    if isinstance(words, dict):
        words = words.get(plan.strategy) or words[str(plan.workload.micro_batch_sequences)]
    words = list(map(str, words))
    folder = Path(plan.run_directory)
    seen = {"rank": place.rank, "store": f"{place.master_address}:{place.master_port}", "folder": str(folder)}
    environment = {"FAKE_STEPS": str(folder / "steps.jsonl"), "FAKE_TOKENS": str(plan.workload.tokens_per_step)}
    environment |= {"RANK": str(place.rank), "LOCAL_RANK": "0"}
    return Command(argv=(*TRAINER, "line", json.dumps(seen), *words), environment=environment)


if __name__ == "__main__":
    nodes.command_on = run.command_on = command_on
    submit.start_command = lambda: (sys.executable, str(Path(__file__).resolve()))
    # A machine that is gone is noticed in the same way, and sooner.
    agreement.LOST_SECONDS = 3.0
    agreement.FAILED_SECONDS = 1.0
    if "FAKE_VERSION" in os.environ:
        environment.own_version = lambda: os.environ["FAKE_VERSION"]
    sys.exit(main(["run", *sys.argv[1:]]))
