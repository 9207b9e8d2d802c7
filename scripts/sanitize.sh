#!/usr/bin/env bash
# Builds the CPU backend alone with gcc's sanitizers and runs its tests. Red when a test fails or a
# sanitizer reports anything. The installed mixprec stays as it is.
#
#   scripts/sanitize.sh OUTPUT_FOLDER [asan] [tsan]
#
# asan: AddressSanitizer and UndefinedBehaviorSanitizer; tsan: ThreadSanitizer. Without steps: both.
set -euo pipefail
cd "$(dirname "$0")/.."
output=$(realpath -m "${1:?usage: scripts/sanitize.sh OUTPUT_FOLDER [asan] [tsan]}")
shift
export OMP_NUM_THREADS=4 # work is shared on a machine with one core too
failed=0 left_out=

build() { # FOLDER FLAG ...
  rm -rf "$1" && mkdir -p "$1/source"
  # A copy: what stands in build/ is taken for up to date, whatever flags it was compiled with.
  cp -r csrc mixprec setup.py pyproject.toml README.md LICENSE "$1/source"
  # A wrapper puts the flags last: setup.py's -g0 would leave reports without line numbers.
  printf '#!/bin/sh\nexec g++ "$@" -g1 %s\n' "${*:2}" >"$1/c++" && chmod +x "$1/c++"
  CXX=$1/c++ CUDA_HOME=$1 python3 -m pip install -q --no-build-isolation --no-deps \
    --target "$1/package" "$1/source" # a CUDA_HOME without nvcc
}

run_tests() { # FOLDER LIBRARY ...
  # Reports go to files: pytest's capture would swallow them where the process ends at once.
  local log=log_path=$1/report status=0
  ASAN_OPTIONS=$log:detect_leaks=0:protect_shadow_gap=0:alloc_dealloc_mismatch=0 \
    UBSAN_OPTIONS=$log:print_stacktrace=1 TSAN_OPTIONS=$log:suppressions=$1/suppressions \
    PYTHONPATH=$1/package LD_PRELOAD=${*:2} pytest -q -m "not large" \
    -k "not (cuda or million or benchmark or resnet or optimizer_step or kill or docs$left_out)" \
    >"$1/pytest.log" 2>&1 || status=$?
  tail -n 25 "$1/pytest.log"
  if [ $status != 0 ] || compgen -G "$1/report.*"; then
    cat "$1"/report.* 2>/dev/null | cut -c -160 | head -n 60
    failed=1
  fi
}

for name in "${@:-asan tsan}"; do for part in $name; do
  printf '\n== %s ==\n' "$part"
  date +%T
  folder=$output/$part
  case $part in
    asan)
      # vptr needs type information that torch does not export.
      build "$folder" -fsanitize=address,undefined -fno-sanitize=vptr \
        -fno-sanitize-recover=undefined -fno-omit-frame-pointer
      run_tests "$folder" "$(g++ -print-file-name=libasan.so)" "$(g++ -print-file-name=libubsan.so)" ;;
    tsan)
      # Several processes talk through threads of torch's, which it was not built to see into.
      left_out=" or ddp or fsdp or test_zero or process_group or rank"
      build "$folder" -fsanitize=thread
      gcc -O2 -Wall -shared -fPIC scripts/tsan_openmp.c -o "$folder/openmp.so"
      gomp=$(python3 -c 'import torch; print(*{m.split()[-1] for m in open("/proc/self/maps") if "gomp" in m})')
      # No line of mixprec runs in it: glibc frees the thread_local variables (pybind11's here) of a
      # thread that has ended.
      echo race:_dl_deallocate_tls >"$folder/suppressions"
      run_tests "$folder" "$(g++ -print-file-name=libtsan.so)" "$folder/openmp.so" "$gomp" ;;
    *) echo "unknown step: $part" >&2; exit 2 ;;
  esac
done; done
date +%T
exit $failed
