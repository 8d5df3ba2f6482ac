"""Read a trace of torch's profiler: JSON for Chrome's trace viewer, plain or gzipped."""

import gc
import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any

from tprimat.core.errors import RecordError
from tprimat.core.limits import LARGEST_UNPACKED
from tprimat.records.store import read_bytes

GZIP_START = b"\x1f\x8b"


def read_trace(path: Path) -> dict[str, Any]:
    """Read a file as a trace.

    Raises:
        RecordError: missing, too large, cut short, or not a trace.
    """
    content, running = read_bytes(path, LARGEST_UNPACKED), gc.isenabled()
    gc.disable()  # the collector of cycles would walk millions of new objects again and again to no effect
    try:
        if content.startswith(GZIP_START):
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                content = file.read(LARGEST_UNPACKED + 1)
        if len(content) > LARGEST_UNPACKED:
            what = f"{path} unpacks to more than {LARGEST_UNPACKED} bytes."
            raise RecordError(what, where=str(path), fix="profile fewer steps, without stacks")
        # Names of kernels come unescaped from the libraries, with control characters and bytes that are not UTF-8.
        document = json.loads(content.decode("utf8", errors="replace"), strict=False)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordError(f"{path} is a damaged gzip file.", where=str(path), why=str(error)) from error
    except (ValueError, RecursionError) as error:
        why = f"{error}; a trace that is cut short looks like this"
        raise RecordError(f"{path} is not JSON.", where=str(path), why=why) from error
    finally:
        if running:
            gc.enable()
    if isinstance(document, list):  # the format allows the events alone
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        why, fix = "It has no list of traceEvents.", "profile_*.json of the output folder"
        raise RecordError(f"{path} is not a trace.", where=str(path), why=why, fix=fix)
    return document
