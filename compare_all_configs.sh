#!/usr/bin/env bash
# Compare output-00 to output-04: each by itself, then all of them side by side.
#
# ./compare_all_configs.sh [OUTPUT_DIR] [FLAGS]
#   OUTPUT_DIR   where compare-00.png to compare-04.png and compare-all.png go (./all_outputs)
#   FLAGS        those of ./compare.py, such as --set warmup=2; with --baseline or --fail-if-slower, which name one folder,
#                only compare-all.png is drawn
set -euo pipefail
here="$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"
export PYTHONPATH="${here}${PYTHONPATH:+:${PYTHONPATH}}"

output=all_outputs
if (($# > 0)) && [[ "$1" != -* ]]; then
    output="$1"
    shift
fi
flags=("$@") alone=1
for flag in "${flags[@]}"; do
    case "${flag}" in
    -h | --help)
        sed -n -E '2,7s/^# ?//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    --results-dir* | --output*)
        sed -n -E '2,7s/^# ?//p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
    --baseline* | --fail-if-slower*) alone=0 ;;
    esac
done
compare() { python3 "${here}/tprimat/__main__.py" compare "$@" "${flags[@]}"; }
shopt -s nullglob
folders=(output-[0-9][0-9]/)
if ((${#folders[@]} == 0)); then
    echo "error: No results here: expected folders output-00 to output-04." >&2
    echo "  try   ${here}/run_all_configs.sh, which writes them" >&2
    exit 2
fi
status=0
for folder in "${folders[@]%/}"; do
    ((alone)) || break
    echo "${folder}"
    compare --results-dir "${folder}" --output "${output}/compare-${folder#output-}.png" || status=1
    echo
done
if ((${#folders[@]} > 1)); then
    echo "all folders"
    compare --results-dir "${folders[@]%/}" --output "${output}/compare-all.png" || status=$?
fi
exit "${status}"
