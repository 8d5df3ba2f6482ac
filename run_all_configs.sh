#!/usr/bin/env bash
# ./run_all_configs.sh [llama|qwen|both] [flags: --help]   the five strategies -> output-00 to output-04, all_outputs/compare-*.png
set -euo pipefail
here="$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"
export PYTHONPATH="${here}${PYTHONPATH:+:${PYTHONPATH}}" TPRIMAT_SCRIPT="${0##*/}"  # the name that --help and errors use
exec python3 "${here}/tprimat/__main__.py" sweep "$@"
