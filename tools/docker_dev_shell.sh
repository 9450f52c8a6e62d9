#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Opens a shell in a container that has vLLM and compilers, with this checkout mounted.
#
#   tools/docker_dev_shell.sh [--device gpu|cpu] [--dry-run] [-- COMMAND...]
#
# The image is the build stage of docker/Dockerfile (gpu; the default if nvidia-smi finds
# one) or docker/Dockerfile.cpu, built first if it is not up to date; --dry-run prints the
# commands. You are yourself in there: what you write in the checkout is yours. Caches,
# the container's .venv and its build folder are in named volumes (vllm-nwor-*), apart
# from the host's. Exit status: the command's, or docker's; 2 for a bad argument.
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)

device=cpu
! nvidia-smi -L >/dev/null 2>&1 || device=gpu
do=() # what runs a command
show() { printf '%q ' "$@" && echo; } # a line that a shell takes back
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case "$1 ${2:-}" in
    "--device gpu" | "--device cpu") device=$2 && shift ;;
    --dry-run*) do=(show) ;;
    *)
        echo "docker_dev_shell: '$*' is not allowed; allowed are --device gpu," \
            "--device cpu, --dry-run, and a command after --" >&2
        exit 2
        ;;
    esac
    shift
done
[ $# = 0 ] || shift

image=vllm-nwor:dev-$device
run=(docker run --rm --interactive --init --user "$(id -u):$(id -g)")
dockerfile=docker/Dockerfile.cpu
[ "$device" = cpu ] || { dockerfile=docker/Dockerfile && run+=(--gpus all); }
[ ! -t 0 ] || run+=(--tty)
# --ipc: vLLM's processes share memory, more than a container's default of 64 MB.
run+=(--ipc host --mount "type=bind,source=$ROOT,target=/src" --workdir /src)
run+=(--mount "type=volume,source=vllm-nwor-cache-$device,target=/cache")
run+=(--mount "type=volume,source=vllm-nwor-venv-$device,target=/src/.venv")
run+=(--mount "type=volume,source=vllm-nwor-build-$device,target=/src/build")
# Everything that wants a home, or to keep something, finds it in the volume.
run+=(--env HOME=/cache --env XDG_CACHE_HOME=/cache --env NWOR_CACHE=/cache/nwor)
run+=(--env "USER=$(id -un 2>/dev/null || id -u)")
# Not a login shell: that would set PATH anew, without CUDA's programs.
[ $# -gt 0 ] || set -- bash
run+=(--entrypoint env "$image" "$@")

"${do[@]}" docker build --target build -f "$ROOT/$dockerfile" -t "$image" "$ROOT"
"${do[@]}" "${run[@]}"
