"""Read lines as a log, without a file."""

from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

from tprimat.config.load import load_config
from tprimat.core.models import model_shape
from tprimat.logs.contents import Claims
from tprimat.logs.lines import LogLines
from tprimat.logs.parse import DIALECTS, LogReading
from tprimat.logs.read import evidence_of, parsed_log, run_of

LOGS = Path(__file__).parent
STEMS = sorted(path.stem for path in LOGS.glob("*.log"))
CONFIG = load_config()
KNOWN = {name: model_shape(model.architecture) for name, model in CONFIG.models.items()}
GIB = 2**30


def lines_of(name):
    return (LOGS / f"{name}.log").read_text(encoding="utf8").splitlines()


def dialect_named(name):
    return next(dialect for dialect in DIALECTS if dialect.name == name)


def reading_of(lines, dialect=None):
    reading = LogReading(name="train.log", dialect=dialect and dialect_named(dialect))
    reading.add(list(lines))
    return reading


def collect(lines, dialect=None):
    return reading_of(lines, dialect).contents


def parsed(contents, **claims):
    steps, evidence, notes = parsed_log(contents, Claims(**claims))
    return SimpleNamespace(steps=steps, evidence=evidence, notes=notes)


def parse(lines, dialect=None, **claims):
    return parsed(collect(lines, dialect), **claims)


def evidence_by(lines, dialect=None):
    return evidence_of(collect(lines, dialect))[0]


def run_from(lines, model, **claims):
    log = LogLines(path="train.log", sha256=sha256("\n".join(lines).encode()).hexdigest())
    return run_of(reading_of(lines), Claims(model=model, **claims), KNOWN, log)


def column(result, name):
    return [getattr(step, name) for step in result.steps]


def dumped(**arguments):
    """Megatron's dump of arguments."""
    rows = [f"  {name} ........ {value}" for name, value in arguments.items()]
    return ["------------------------ arguments ------------------------", *rows, "-------------------- end of arguments -----"]


def iterations(first, seconds, total=60):
    """Lines of Megatron-LM."""
    text = " iteration {:8d}/ {} | elapsed time per iteration (ms): {:.1f} | global batch size: 128 | lm loss: 2.0 |"
    return [text.format(number, total, second * 1e3) for number, second in enumerate(seconds, first)]
