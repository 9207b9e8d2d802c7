#!/usr/bin/env bash
# Installs another torch into an environment of its own, builds the CPU backend with it and runs the tests.
#
#   scripts/with_torch.sh VERSION FOLDER
#
# FOLDER, for the environment, is made anew. Without torchvision: the benchmark's tests skip.
set -euo pipefail
cd "$(dirname "$0")/.."
usage='usage: scripts/with_torch.sh VERSION FOLDER'
version=${1:?$usage} folder=$(realpath -m "${2:?$usage}")
python3 -m venv --clear "$folder"
"$folder/bin/pip" install "torch==$version"
# A CUDA_HOME without an nvcc: the CPU backend alone.
CUDA_HOME=$folder "$folder/bin/pip" install -v . pytest hypothesis numpy
"$folder/bin/pytest"
