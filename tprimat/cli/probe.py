"""Measure how fast this machine is, from single operations to small training loops."""

import argparse
import sys
from collections.abc import Iterable

from tprimat.records.schema import ProbeRecord
from tprimat.runner import probes
from tprimat.runner.probes import DTYPES, KINDS, ON_REQUEST, ProbeRequest


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, 1 if ranks failed, 130 after Ctrl-C, 143 after SIGTERM; the page holds what was measured."""
    request = ProbeRequest(
        kinds=probes.named(options.kinds, (*KINDS, *ON_REQUEST), "probe"),
        output=options.output,
        dtypes=probes.named(options.dtype, DTYPES, "dtype") if options.dtype else None,
        ranks=options.ranks,
        resume=options.resume,
    )
    from tprimat.probe.case import is_rank

    if is_rank():
        probes.measure_as_rank(request)
        return 0
    return show(probes.measure(request), request, as_json=options.json)


def show(records: Iterable[ProbeRecord], request: ProbeRequest, *, as_json: bool) -> int:
    """Print the results and write the page; return 1 if ranks failed. An operation that a device refuses is a result."""
    from tprimat.records.store import to_json
    from tprimat.report.probes import on_a_screen
    from tprimat.report.tables import plural, screen_of
    from tprimat.runner.progress import say

    measured = []
    try:
        for record in records:
            measured.append(record)
            if as_json:
                print(to_json(record), flush=True)
    except (KeyboardInterrupt, SystemExit):
        probes.write_page(request)
        say("stopped; --resume continues from here")
        raise
    if measured and not as_json:
        print(on_a_screen(measured, screen_of(sys.stdout)))
    failed = sum(record.error is not None for record in measured)
    without = f", {failed} without a result" if failed else ""
    written = probes.write_page(request)
    page = f", one page in {written}" if written else ""
    say(f"{plural(len(measured), 'measurement')}{without}; all samples are in {request.file}{page}")
    return int(any(record.kind in probes.RANK_KINDS and record.error for record in measured))
