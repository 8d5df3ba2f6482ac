#!/usr/bin/env bash
# ./compare_all_configs.sh [OUTPUT_DIR] [FLAGS]   output-00 to output-04 here -> OUTPUT_DIR/compare-00.png to compare-04.png, each
#                                                 folder by itself, and OUTPUT_DIR/compare-all.png, all of them side by side
#                                                 (./all_outputs); FLAGS are those of ./compare.py: --set warmup=2. With those
#                                                 that name one folder (--baseline, --fail-if-slower), only compare-all.png.
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
    -h | --help | --results-dir* | --output*)
        sed -n 's/^# //p' "${BASH_SOURCE[0]}" >&2
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
