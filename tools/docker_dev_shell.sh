#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Opens a shell in a container that has vLLM and compilers, with this checkout mounted.
#
#   tools/docker_dev_shell.sh [OPTION...] [-- COMMAND...]
#
#   --device auto|gpu|cpu   which image; auto (the default): gpu if nvidia-smi finds one
#   --dry-run               print the commands and run nothing
#
# The image is the build stage of docker/Dockerfile or docker/Dockerfile.cpu, built
# first if it is not up to date. You are yourself in there: what you write in the
# checkout is yours. Caches, the container's .venv and its build folder are in named
# volumes (vllm-nwor-*), apart from the host's. Without COMMAND it is bash. Exit status:
# the command's, or docker's; 2 for a bad argument.
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)

refuse() { # WORD...
    echo "docker_dev_shell: $*" >&2
    exit 2
}

device=auto
do=() # what runs a command
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
    --device)
        [ $# -gt 1 ] || refuse "--device needs a value"
        device=$2
        shift
        ;;
    --dry-run) do=(show) ;;
    -h | --help) sed -n '3,14s/^# \{0,1\}//p' "$0" && exit ;;
    *) refuse "unknown argument '$1'; allowed are --device, --dry-run, --help," \
        "and a command after --" ;;
    esac
    shift
done
[ $# = 0 ] || shift
show() { printf '%q ' "$@" && echo; } # a line that a shell takes back

if [ "$device" = auto ]; then
    device=cpu
    ! nvidia-smi -L >/dev/null 2>&1 || device=gpu
fi
image=vllm-nwor:dev-$device
run=(docker run --rm --interactive --init --user "$(id -u):$(id -g)")
case $device in
gpu) dockerfile=docker/Dockerfile && run+=(--gpus all) ;;
cpu) dockerfile=docker/Dockerfile.cpu ;;
*) refuse "--device is '$device'; allowed are auto, gpu and cpu" ;;
esac
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
if [ $# -gt 0 ]; then
    run+=(--entrypoint env "$image" "$@")
else
    run+=(--entrypoint bash "$image")
fi

"${do[@]}" docker build --target build -f "$ROOT/$dockerfile" -t "$image" "$ROOT"
"${do[@]}" "${run[@]}"
