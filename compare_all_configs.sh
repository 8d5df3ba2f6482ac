#!/usr/bin/env bash
# ./compare_all_configs.sh [OUTPUT_DIR]   output-00 to output-04 here -> OUTPUT_DIR/compare-00.png to compare-04.png (./all_outputs)
set -euo pipefail
here="$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"
PYTHONPATH="${here}${PYTHONPATH:+:${PYTHONPATH}}" exec python3 "${here}/tprimat/__main__.py" compare-all "$@"
