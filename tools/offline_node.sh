#!/usr/bin/env bash
# Run a command with bmt on an offline GPU node: one that has Python, torch and the run-time dependencies, but no network
# and no hatchling.
#
#   here:         python3 tools/dev.py wheels              # fills dist/
#   on the node:  tools/offline_node.sh COMMAND [ARG ...]   # in a copy of this tree with dist/
#
# Packages of Python come from the wheels in dist/. bmt-kernels is compiled on the node, from the sources of this tree, where
# there are cmake, ninja, pybind11, scikit-build-core and a C++ compiler; elsewhere plain torch does its work. All of them go
# into a directory of their own, which is put in front of the node's packages; nothing of the node changes. What is
# compiled stays in packages/bmt-kernels/build, so that only the first call takes its time.
# BMT_CUDA_ARCHITECTURES (default: 90, that of H100 and H200) says for which GPUs.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$#" -eq 0 ]; then
    sed -n '2,13s/^# \{0,1\}//p' "$0"
    exit 2
fi
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
install() {
    python3 -m pip install --quiet --no-index --no-deps --target "$site" "$@"
}
install dist/*-none-any.whl
export BMT_CUDA_ARCHITECTURES="${BMT_CUDA_ARCHITECTURES:-90}"
if python3 -c 'import pybind11, scikit_build_core' 2>/dev/null; then
    SKBUILD_BUILD_DIR='build/{wheel_tag}' install --no-build-isolation ./packages/bmt-kernels
else
    echo "offline_node.sh: bmt-kernels is left out: pybind11 or scikit-build-core is missing" >&2
fi
# NVLink multicast stays off: on shared hosts a program that uses it can take the GPUs of others down.
export PYTHONPATH="$site" NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
"$@"
