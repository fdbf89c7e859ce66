#!/bin/bash
# What a change of kernels must show on a machine with GPUs, in one run: exact results first, then the clock. Every part
# is bounded, so that a kernel that spins does not take the others' time.
#
#   benchmarks/measure.sh OUT [PART...]      parts: verify gpu dist dense decode moe; default: all
#
# Result files and logs go to OUT. flux must be importable by $PYTHON, or else python3. FLUX_COMMIT names the commit where
# there is no git. Exit status: how many parts failed.
set -u
out=${1:?usage: benchmarks/measure.sh OUT [PART...]}
shift
parts=" ${*:-verify gpu dist dense decode moe} "
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd) # before leaving the folder that a relative path is meant from
cd "$(dirname "$0")/.." || exit
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
failed=0

# run SECONDS NAME COMMAND...
run() {
  local seconds=$1 name=$2 start=$SECONDS
  shift 2
  timeout -k 5 "$seconds" "$@" >"$out/$name.log" 2>&1
  local status=$?
  ((status == 0)) || failed=$((failed + 1))
  echo "$name: status $status, $((SECONDS - start)) s; $(tail -n 1 "$out/$name.log" | cut -c1-160)"
}
bench() {
  local seconds=$1 name=$2
  shift 2
  run "$seconds" "$name" "$python" -m flux bench "$@" --json "$out/$name-tp$gpus.json"
}
has() { [[ $parts == *" $1 "* ]]; }

if has verify; then
  run 60 doctor "$python" -m flux doctor --json "$out/doctor.json"
  run 180 verify "$python" -m flux verify --json "$out/verify.json"
fi
if has gpu; then # side by side: they take one GPU each
  files=(tests/gpu/test_gpu_*.py)
  for ((i = 0; i < ${#files[@]}; i++)); do
    name=$(basename "${files[i]}" .py)
    CUDA_VISIBLE_DEVICES=$((i % (gpus > 0 ? gpus : 1))) OMP_NUM_THREADS=8 \
      timeout -k 5 400 "$python" -m pytest -q "${files[i]}" >"$out/$name.log" 2>&1 &
  done
  wait
  for file in "${files[@]}"; do
    name=$(basename "$file" .py)
    last=$(tail -n 1 "$out/$name.log")
    [[ $last == *passed* && $last != *failed* && $last != *error* ]] || failed=$((failed + 1))
    echo "$name: $last"
  done
fi
if has dist; then run 600 dist "$python" -m pytest -q -x tests/dist; fi
if has dense; then
  CUDA_VISIBLE_DEVICES=0 bench 300 gemm gemm --tp "$gpus"
  bench 300 gemm_rs gemm_rs
  bench 300 ag_gemm ag_gemm
fi
if has decode; then
  bench 300 gemm_ar gemm_ar --suite decode
  bench 300 gemm_ar_norm gemm_ar_norm --suite decode
  bench 120 all_reduce all_reduce --suite decode
  bench 120 all_reduce_norm all_reduce_norm --suite decode
fi
if has moe; then
  bench 300 moe moe_layer0 moe_layer1 --imbalance 0.032 --model mixtral-8x7b --model qwen3-235b
  bench 300 moe-large moe_layer0 moe_layer1 --imbalance 0.032 --model flux-demo --model deepseek-v3
  bench 120 moe-ctas moe_ctas --imbalance 0 --ep 1 --model mixtral-8x7b --model qwen3-235b
  bench 120 moe_route moe_route --imbalance 0.032
fi
exit "$failed"
