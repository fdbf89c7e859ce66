#!/bin/bash
# Everything that a machine with 2 or 4 free GPUs has to say about a commit, in one go and bounded in time:
#   benchmarks/measure.sh OUT_DIR [PYTHON]
# Correctness first, then the result files of docs/benchmarks.md. flux must be importable by PYTHON.
set -u
mkdir -p "${1:?usage: measure.sh OUT_DIR [PYTHON]}"
out=$(cd "$1" && pwd) # before leaving the folder that a relative path is meant from
python=${2:-python3}
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
cd "$(dirname "$0")/.."
rm -f "$out/failed"

step() { # NAME SECONDS COMMAND...
  local name=$1 seconds=$2 start=$SECONDS
  shift 2
  echo "=== $name"
  timeout "$seconds" "$@" >"$out/$name.log" 2>&1 || echo "$name" >>"$out/failed"
  tail -n 12 "$out/$name.log"
  echo "=== $name: $((SECONDS - start)) s"
}

step verify 120 "$python" -m flux verify --json "$out/verify.json"
step gemm_rs 300 "$python" -m flux bench gemm_rs --json "$out/gemm_rs-tp$gpus.json"
if ((gpus >= 4)); then
  # The pairs don't share a link: one measures TP 2 while the other is busy with what needs one GPU.
  CUDA_VISIBLE_DEVICES=0,1 step gemm_rs-2 400 "$python" -m flux bench gemm_rs --json "$out/gemm_rs-tp2.json" &
  (
    CUDA_VISIBLE_DEVICES=2 step gemm-4 200 "$python" -m flux bench gemm --tp 4 --json "$out/gemm-tp4.json"
    CUDA_VISIBLE_DEVICES=2 step gemm-2 300 "$python" -m flux bench gemm --tp 2 --json "$out/gemm-tp2.json"
  ) &
  wait
else
  CUDA_VISIBLE_DEVICES=0 step gemm 200 "$python" -m flux bench gemm --tp "$gpus" --json "$out/gemm-tp$gpus.json"
fi
step tests 600 "$python" -m pytest -q tests/gpu tests/dist
step doctor 60 "$python" -m flux doctor --json "$out/doctor.json"

if [[ -s "$out/failed" ]]; then
  echo "failed:" $(<"$out/failed")
  exit 1
fi
