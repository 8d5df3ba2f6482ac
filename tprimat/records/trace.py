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


def read_document(path: Path) -> Any:
    """Read the JSON of a file, plain or gzipped.

    Raises:
        RecordError: missing, too large, or cut short.
    """
    content = read_bytes(path, LARGEST_UNPACKED)
    if content.startswith(GZIP_START):
        content = _unpacked(content, path)
    running = gc.isenabled()
    gc.disable()  # the collector of cycles would walk millions of new objects again and again to no effect
    try:
        # Names of kernels come unescaped from the libraries, with control characters and bytes that are not UTF-8.
        return json.loads(content.decode("utf8", errors="replace"), strict=False)
    except (ValueError, RecursionError) as error:
        why = f"{error}; a trace that is cut short looks like this"
        raise RecordError(f"{path} is not JSON.", where=str(path), why=why) from error
    finally:
        if running:
            gc.enable()


def _unpacked(content: bytes, path: Path) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            unpacked = file.read(LARGEST_UNPACKED + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordError(f"{path} is a damaged gzip file.", where=str(path), why=str(error)) from error
    if len(unpacked) > LARGEST_UNPACKED:
        what = f"{path} unpacks to more than {LARGEST_UNPACKED} bytes."
        raise RecordError(what, where=str(path), fix="profile fewer steps, without stacks")
    return unpacked


def trace_of(document: Any, path: Path) -> dict[str, Any]:
    """Return a document as a trace.

    Raises:
        RecordError: it is not a trace.
    """
    if not (isinstance(document, list) or (isinstance(document, dict) and isinstance(document.get("traceEvents"), list))):
        why, fix = "It has no list of traceEvents.", "profile_*.json of the output folder"
        raise RecordError(f"{path} is not a trace.", where=str(path), why=why, fix=fix)
    return {"traceEvents": document} if isinstance(document, list) else dict(document)  # the format allows the events alone
