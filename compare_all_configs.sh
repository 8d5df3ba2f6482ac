#!/usr/bin/env bash
# ./compare_all_configs.sh [OUTPUT_DIR]   output-00 to output-04 here -> OUTPUT_DIR/compare-00.png to compare-04.png, each folder by
#                                         itself, and OUTPUT_DIR/compare-all.png, all of them side by side (./all_outputs)
set -euo pipefail
here="$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"
export PYTHONPATH="${here}${PYTHONPATH:+:${PYTHONPATH}}"
compare() { python3 "${here}/tprimat/__main__.py" compare "$@"; }

output="${1:-all_outputs}"
if (($# > 1)) || [[ "${output}" == -* ]]; then
    sed -n 's/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
shopt -s nullglob
folders=(output-[0-9][0-9]/)
if ((${#folders[@]} == 0)); then
    echo "error: No results here: expected folders output-00 to output-04." >&2
    echo "  try   ${here}/run_all_configs.sh, which writes them" >&2
    exit 2
fi
status=0
for folder in "${folders[@]%/}"; do
    echo "${folder}"
    compare --results-dir "${folder}" --output "${output}/compare-${folder#output-}.png" || status=1
    echo
done
if ((${#folders[@]} > 1)); then
    echo "all folders"
    compare --results-dir "${folders[@]%/}" --output "${output}/compare-all.png" || status=1
fi
exit "${status}"
