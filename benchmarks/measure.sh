#!/bin/bash
# measure.sh OUT [PART...]: what flux must show on a machine with GPUs; PART of verify dist killed dense decode fp8 moe
# gpu models nodes sanitizer. Each step has a limit of its own. One that ended well is not run again, so call it again
# to go on; MINUTES=9 begins no step after that. Exit status 1 if something asked for is missing.
set -u
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?measure.sh OUT [PART...]}")
shift
wanted=" ${*:-verify dist killed dense decode fp8 moe gpu models nodes sanitizer} "
python=${PYTHON:-python3} gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
export FLUX_COMMIT=${FLUX_COMMIT:-$(git describe --always --dirty)}
case $FLUX_COMMIT in *-dirty) echo "measure.sh: commit first" >&2; exit 2 ;; esac
mkdir -p "$out"
[ "$(cat "$out/commit" 2>/dev/null || echo "$FLUX_COMMIT")" = "$FLUX_COMMIT" ] || {
  echo "measure.sh: $out has results of commit $(cat "$out/commit")" >&2
  exit 2
}
echo "$FLUX_COMMIT" >"$out/commit"
missing=0

step() { # PART NAME SECONDS ARGUMENTS-OF-PYTHON...
  local part=$1 name=$2 seconds=$3
  shift 3
  [[ $wanted == *" $part "* ]] && ! [ -e "$out/$name.done" ] || return 0
  if [ "$SECONDS" -gt $((60 * ${MINUTES:-100000})) ]; then
    echo "$name: left for another run"
  elif timeout -k 5 "$seconds" "$python" "$@" >"$out/$name.log" 2>&1 && ! tail -1 "$out/$name.log" | grep -q '^[0-9]* skipped'; then
    touch "$out/$name.done"
  fi
  [ -e "$out/$name.done" ] && echo "$name: done" || { missing=1; echo "$name: missing: $(tail -1 "$out/$name.log" 2>/dev/null)"; }
}
bench() { # PART NAME SECONDS OPTIONS...
  local part=$1 name=$2 seconds=$3
  shift 3
  step "$part" "$name" "$seconds" -m flux bench "$@" --json "$out/$(date +%F)-$name-${gpus}gpus-$FLUX_COMMIT.json"
}
tests() { # PART FOLDER OPTIONS...
  local part=$1 folder=$2 file
  shift 2
  for file in tests/"$folder"/test_*.py; do step "$part" "$part-$(basename "$file" .py)" 400 -m pytest -q "$file" "$@"; done
}

# What decides most comes first. Limits are about twice what a step takes on four GPUs.
step verify doctor 60 -m flux doctor --json "$out/doctor.json"
step verify verify 240 -m flux verify --json "$out/verify.json"
if [ "$gpus" -gt 1 ]; then
  for op in gemm_rs ag_gemm; do bench dense $op 180 $op; done
  bench moe moe 400 moe_layer0 moe_layer1
  bench moe moe_mlp 120 moe_mlp
  for op in gemm_ar gemm_ar_norm; do bench decode $op 400 $op --suite decode; done
  for op in all_reduce all_reduce_norm; do bench decode $op 150 $op --suite decode; done
  tests dist dist -k "not killed"
  step killed killed 590 -m pytest -q tests/dist -k killed
  for op in gemm_rs ag_gemm; do bench fp8 $op-fp8 590 $op --dtype fp8; done
  bench fp8 gemm_ar-fp8 590 gemm_ar --suite decode --dtype fp8
  bench fp8 moe-fp8 590 moe_layer0 moe_layer1 --dtype fp8
  bench moe moe_route 120 moe_route
  bench moe moe-hot 300 moe_layer0 moe_layer1 --imbalance hot
  for op in layer_forward layer_training; do bench models $op 300 $op; done
  for nodes in 2 4; do
    [ $((gpus % nodes)) = 0 ] && [ "$gpus" -gt $nodes ] || continue
    step nodes verify-$nodes-nodes 300 -m flux verify --nodes $nodes
  done
fi
bench dense gemm 300 gemm --tp "$gpus"
for suite in default decode; do bench fp8 gemm-fp8-$suite 590 gemm --dtype fp8 --suite $suite --tp "$gpus"; done
tests gpu gpu
for check in memcheck racecheck synccheck; do step sanitizer $check 590 -m pytest -q tests/gpu/test_gpu_sanitizer.py -k $check; done
exit $missing
