#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs an NVIDIA GPU, step by step:
#
#   tools/gpu_run.sh [STEP [ARGUMENT...]]...
#
# Steps, their arguments, the variables that are read, the status: tools/gpu/README.md.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

PYTHON=${PYTHON:-python3}
STEPS=" build kernels engines faults sync layouts sleep audit poison weights offload"
STEPS="$STEPS real parallel ray sanitizer bench-kernels host-profile bench soak "
WORK=${NWOR_WORK:-$(mktemp -d "${TMPDIR:-/tmp}/nwor-gpu-XXXXXX")}
RESULTS=${NWOR_RESULTS:-results}
mkdir -p "$WORK" "$RESULTS"
RESULTS=$(cd "$RESULTS" && pwd)

export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export NWOR_GPU_RESULTS=$RESULTS NWOR_GPU_TEST_DIR=$WORK/engines
export PYTHON NWOR_RESULTS=$RESULTS NWOR_WORK=$WORK # for --step, which runs one here

run_tests() { # pytest without what only developers want
    "$PYTHON" -m pytest -q -p no:cacheprovider --tb=short "$@"
}

also() { # SUFFIX NAME...: " and (aSUFFIX or bSUFFIX)" for pytest -k; "" without names
    local filter="" name
    for name in "${@:2}"; do
        filter="${filter:+$filter or }$name$1"
    done
    echo "${filter:+ and ($filter)}"
}

gpu_tests() { # FILE ENGINE...: tests with the engine as their only parameter
    run_tests -s "tests/gpu/test_$1.py" -k "test_$(also ] "${@:2}")"
}

step_build() {
    local site=${NWOR_SITE:-} first=${PYTHONPATH:-} staging=$WORK/staging
    first=${first%%:*}
    [ ! -f "$first/vllm/__init__.py" ] || site=${site:-$first}
    export NWOR_CUDA=ON NWOR_CUDA_ARCHS=${NWOR_CUDA_ARCHS:-90}
    local what=. wheels=(dist/vllm_nwor-*.whl)
    if [ -f "${wheels[0]}" ]; then
        if [ ${#wheels[@]} -gt 1 ]; then
            echo "dist/ has ${#wheels[@]} wheels; expected one: ${wheels[*]}" >&2
            return 1
        fi
        what=${wheels[0]}
        rm -rf "$staging" && "$PYTHON" -m zipfile -e "$what" "$staging" || return
        diff -rq -x '*.so' -x __pycache__ "$staging/vllm_nwor" vllm/v1/nwor || {
            echo "$what is not of this checkout (make wheel)" >&2
            return 1
        }
    fi
    echo "installing $what"
    local pip=("$PYTHON" -m pip install --no-index --no-deps --no-build-isolation)
    pip+=(--disable-pip-version-check)
    if [ -z "$site" ]; then
        "${pip[@]}" --force-reinstall "$what" || return
    else
        # Staged, so that a build that fails leaves what is there.
        rm -rf "$staging"
        "${pip[@]}" --target "$staging" "$what" || return
        rm -rf "$site"/vllm_nwor "$site"/vllm_nwor-*.dist-info
        cp -a "$staging/." "$site/" || return
    fi
    VLLM_NWOR_MODE=stage "$PYTHON" -m vllm_nwor.doctor --device cuda
}

step_kernels() {
    run_tests tests/kernels -k "cuda or gpu" --durations=5 "$@" | tee "$WORK/kernels.log"
    local status=$?
    "$PYTHON" -m tests.gpu.results "kernels $*" "kernels=$status" && return $status
}

step_engines() {
    local file=tests/gpu/test_engine_matrix.py
    run_tests -s $file -k "test_matrix$(also - "$@")" || return
    [ $# -gt 0 ] || run_tests -s $file -k 'test_why or test_a_missed'
}

step_faults() { # parameters go on with what fails
    run_tests -s tests/gpu/test_faults.py -k "test_$(also - "$@")"
}

step_sync() { gpu_tests no_sync "$@"; }
step_layouts() { gpu_tests layouts "$@"; }
step_audit() { gpu_tests audit "$@"; }
step_poison() { gpu_tests poison "$@"; }
step_weights() { gpu_tests weights "$@"; }
step_offload() { run_tests -s tests/gpu/test_offloading.py -k "not real_weights$(also ] "$@")"; }
# The models: tools/gpu/README.md.
step_real() { run_tests -s tests/gpu/test_{engine_matrix,audit,offloading}.py -k "real_weights$(also "" "$@")"; }
step_parallel() { run_tests -s tests/gpu/test_engine_matrix.py -k test_two_ranks; }
step_ray() { run_tests -s tests/gpu/test_engine_matrix.py -k test_ray; }

step_sleep() { # parameters end with the engine's name, or go on with the phase's
    run_tests -s tests/gpu/test_sleep.py -k "test_$(also "" "${@/%/]}" "${@/%/-}")"
}

step_soak() {
    local model head
    { read -r model && read -r head; } < <("$PYTHON" -c '
from benchmarks import settings
for name in ("shape:llama-8b", "shape:llama-8b-eagle"):
    print(settings.find_model("--model", name, settings.TARGET).location)') || return
    local mode=${2:-stage} log=$NWOR_GPU_TEST_DIR/soak.log
    mkdir -p "$NWOR_GPU_TEST_DIR"
    local args="--load-format dummy --skip-tokenizer-init --served-model-name llama-8b"
    args="$args --max-model-len 2048 --max-num-seqs 64 --gpu-memory-utilization 0.5"
    local drafts='{"method": "ngram", "num_speculative_tokens": 4,
        "prompt_lookup_min": 1, "prompt_lookup_max": 4}'
    local more=()
    if [ "$mode" = audited ]; then
        # Few blocks: requests are preempted. vLLM 0.26 with a KV connector ends when a
        # request is aborted that waits (issue 49118). Two drafts of four are accepted.
        mode=stage
        local connector='"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 4294967296,
                "offload_prompt_only": false}'
        args="$args --num-gpu-blocks-override 640 --kv-transfer-config '{$connector}'"
        drafts='"method": "eagle", "num_speculative_tokens": 4,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [1, 1, 0, 0]'
        drafts="{$drafts, \"model\": \"$head\"}"
        more=(--env VLLM_NWOR_AUDIT=log --env VLLM_NWOR_AUDIT_MIB=65536)
        more+=(--without abort_before_first_token)
        more+=(--env VLLM_USE_V2_MODEL_RUNNER=1 --env VLLM_NWOR_SHADOW_BLOCKS=128)
    fi
    # Token ids: weights are random. The probe is alone: greedy answers depend on the
    # batch. Freed memory is given back at once, so that a leak can be seen.
    "$PYTHON" tools/soak/soak.py --model "$model" --minutes "${1:-5}" --device cuda \
        --mode "$mode" --json "$RESULTS/soak.jsonl" --log "$log" \
        --env MALLOC_MMAP_THRESHOLD_=131072 --env MALLOC_TRIM_THRESHOLD_=131072 \
        --vocab-size 120000 --probe quiet --probe-seconds 20 --concurrency 32 \
        --speculative-config "$drafts" --serve-args "$args" "${more[@]}"
    local status=$?
    # What ended an engine stands before what its API servers say of it.
    [ $status = 0 ] || { grep -m 40 ERROR "$log"; tail -30 "$log"; }
    return $status
}

step_sanitizer() {
    local status failed=0 log=$WORK/planted.log
    [ $# -gt 0 ] || set -- memcheck racecheck initcheck synccheck
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    local check=(compute-sanitizer --error-exitcode 9)
    local tests=("$PYTHON" -m pytest -q -p no:cacheprovider -k cuda)
    NWOR_PLANTED=1 timeout 150 "${check[@]}" "${tests[@]}" \
        tests/kernels/test_planted.py >"$log" 2>&1
    status=$?
    echo "planted overrun: exit status $status (9: reported, as it must be)"
    [ $status = 9 ] || { tail -20 "$log"; failed=1; }
    local found=("planted=$status")
    local -A process
    for tool in "$@"; do # at the same time
        timeout "${NWOR_SANITIZER_S:-400}" "${check[@]}" --tool "$tool" \
            "${tests[@]}" -m sanitizer tests/kernels >"$WORK/$tool.log" 2>&1 &
        process[$tool]=$!
    done
    for tool in "$@"; do
        wait "${process[$tool]}"
        status=$?
        echo "$tool: exit status $status"
        grep -E "ERROR SUMMARY|passed|failed" "$WORK/$tool.log" | tail -3
        [ $status = 0 ] || { tail -30 "$WORK/$tool.log"; failed=1; }
        found+=("$tool=$status")
    done
    "$PYTHON" -m tests.gpu.results sanitizer "${found[@]}" || failed=1
    return $failed
}

step_bench-kernels() {
    "$PYTHON" bench_kernels.py --device cuda --json "$RESULTS/kernels.jsonl" "$@"
}

cells() { # PROGRAM ARGUMENT... -- CELL...
    local failed=0 call=()
    while [ "$1" != -- ]; do call+=("$1") && shift; done
    for cell in "${@:2}"; do
        timeout --kill-after=10 "${NWOR_CELL_S:-480}" "$PYTHON" "${call[@]}" "$cell" || failed=1
    done
    return $failed
}

step_host-profile() {
    [ $# -gt 0 ] || set -- v2-k4-a70 v1-ngram-k4-a70
    cells tools/gpu/host_profile.py --json "$RESULTS/host_time.jsonl" -- "$@"
}

step_bench() {
    # shellcheck disable=SC2046 # a name is a word
    [ $# -gt 0 ] || set -- $("$PYTHON" -c 'from tools.gpu.bench import *; print(*BUDGETED)')
    cells tools/gpu/bench.py --results "$RESULTS" --seconds "${NWOR_BENCH_S:-70}" -- "$@"
}

run_step() { # STEP ARGUMENT...: in a process of its own, which can be stopped whole
    local name=$1 started=$SECONDS limit=570 status
    echo "== $*"
    case $name in
    build) limit=300 ;;
    parallel) limit=900 ;;
    bench) limit=3600 ;; # each cell has its own
    soak) limit=7200 ;;  # as long as its argument says
    esac
    timeout --kill-after=5 "${NWOR_LIMIT_S:-$limit}" \
        "$BASH" tools/gpu_run.sh --step "$@"
    status=$?
    [ $status = 124 ] && echo "== $name: stopped at its limit"
    echo "== $name: exit status $status, $((SECONDS - started)) s"
    return $status
}

if [ "${1:-}" = --step ]; then
    "step_$2" "${@:3}"
    exit
fi

failed=""
step=()
finish_step() {
    if [ ${#step[@]} -gt 0 ]; then
        run_step "${step[@]}" || failed="$failed ${step[0]}"
    fi
    step=()
}

[ $# -gt 0 ] || set -- build kernels engines sync layouts
for argument in "$@"; do
    if [[ $STEPS == *" $argument "* ]]; then
        finish_step
        step=("$argument")
    elif [ ${#step[@]} -gt 0 ]; then
        step+=("$argument")
    else
        echo "unknown step: $argument; allowed:$STEPS" >&2
        exit 2
    fi
done
finish_step

echo "== results in $RESULTS: $(cd "$RESULTS" && echo *)"
echo "== failed:${failed:- none}"
[ -z "$failed" ]
