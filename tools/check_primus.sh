#!/usr/bin/env bash
# Feed every experiment file and override that we generate to the parser of a Primus checkout. Needs no GPU and no torch.
#
#   tools/check_primus.sh /path/to/Primus
#   tools/check_primus.sh /path/to/Primus --lr=1e-05                 check further overrides as well
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/check_primus.py" "$@"
