#!/usr/bin/env bash
# Builds, tests and benchmarks mixprec on a machine with a GPU, torch and nvcc, in one go.
#
#   scripts/gpu.sh OUTPUT_FOLDER [build] [test] [sanitize] [step] [train]
#
# Without steps: all. `train` takes more arguments for benchmarks/resnet_cifar.py from TRAIN_ARGS.
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:?usage: scripts/gpu.sh OUTPUT_FOLDER [STEP ...]}
shift
mkdir -p "$output"
read -ra train_args <<<"${TRAIN_ARGS:-}"
export PYTHONUNBUFFERED=1

step() { printf '\n== %s ==\n' "$1"; date +%T; }

for name in "${@:-build test sanitize step train}"; do for part in $name; do
  step "$part"
  case $part in
    build)
      python3 -m pip install -q --no-index --no-build-isolation --no-deps --force-reinstall . ;;
    test)
      pytest -q -rs --durations=15 2>&1 | tee "$output/pytest.log" ;;
    sanitize)
      # mixprec's kernels alone, but initcheck has to see torch's as well: they write what ours read.
      # Without torch's caching a tool sees where each tensor ends. Captures need it, and so does the
      # list of 3,000 tensors under initcheck, which would take over ten minutes. The tools keep
      # Python's frames alive, and they the optimizer of the test of one that is gone.
      for tool in memcheck racecheck synccheck initcheck; do
        only=(--kernel-name kns=mixprec) slow=none
        [ $tool = initcheck ] && only=() slow=3000
        check=(compute-sanitizer --tool $tool "${only[@]}" --error-exitcode 1 pytest -q -x)
        {
          PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${check[@]}" tests/test_{layouts,clip,report_overflow}.py \
            -k "cuda and not $slow and not gone"
          "${check[@]}" tests/test_layouts.py tests/test_graphed.py \
            -k "cuda and $slow or memsets or inputs_of_every_size or outputs or changes_between"
        } 2>&1 | tee "$output/$tool.log" | tail -n 8
      done ;;
    step)
      python3 benchmarks/optimizer_step.py --clip 1.0 --out "$output/step" 2>&1 | tee "$output/step.log" ;;
    train)
      python3 benchmarks/resnet_cifar.py --out "$output/train" "${train_args[@]}" 2>&1 | tee "$output/train.log" ;;
    *) echo "unknown step: $part" >&2; exit 2 ;;
  esac
done; done
