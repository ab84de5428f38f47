#!/usr/bin/env bash
# Run a command with bmt on an offline GPU node: one that has Python, torch and the run-time dependencies, but no network
# and no hatchling.
#
#   here:         python3 tools/dev.py wheels              # fills dist/
#   on the node:  tools/offline_node.sh COMMAND [ARG ...]   # in a copy of this tree with dist/
#
# The wheels go into a directory of their own, which is put in front of the node's packages; nothing of the node changes.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$#" -eq 0 ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
fi
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" dist/*.whl
# NVLink multicast stays off: on shared hosts a program that uses it can take the GPUs of others down.
export PYTHONPATH="$site" NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
"$@"
