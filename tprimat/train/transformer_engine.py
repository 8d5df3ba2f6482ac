"""Whether Transformer Engine works here; a package that is installed and does not load is hidden from Megatron-Core."""

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec

NAME = "transformer_engine"


@cache
def is_usable() -> bool:
    """Whether it can be imported; NeMo then builds its layers from it.

    Call it before anything imports megatron.core, which takes an ImportError for absence: a package whose libraries do not
    load raises an OSError, at which Megatron-Core itself would not even import.
    """
    if sys.modules.get(NAME) is None and (NAME in sys.modules or find_spec(NAME) is None):
        return False
    try:
        import_module(f"{NAME}.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        sys.stderr.write(f"Transformer Engine is installed and cannot be imported; going on without it: {error}\n")
        for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
            del sys.modules[name]
        sys.modules[NAME] = None  # type: ignore[assignment]  # Python's way to make further imports fail
        return False
    return True
