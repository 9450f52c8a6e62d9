#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Opens a shell in a container that has vLLM and compilers, with this checkout mounted.
#
#   tools/docker_dev_shell.sh [OPTION...] [-- COMMAND...]
#
#   --device auto|gpu|cpu   which image; auto (the default): gpu if nvidia-smi finds one
#   --image NAME            use this image; nothing is built then
#   --dry-run               print the commands and run nothing
#
# The image is the build stage of docker/Dockerfile or docker/Dockerfile.cpu, built
# first if it is not up to date. You are yourself in there: what you write in the
# checkout is yours. Caches, the container's .venv and its build folder are in named
# volumes (vllm-nwor-*), apart from the host's. Without COMMAND it is bash. Exit status:
# the command's; 2 for a bad argument; 1 without Docker.
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)

fail() {
    local status=$1
    shift
    echo "docker_dev_shell: $*" >&2
    exit "$status"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

device=auto
image=
dry_run=
while [ $# -gt 0 ]; do
    case $1 in
    --device | --image)
        [ $# -gt 1 ] || fail 2 "$1 needs a value"
        if [ "$1" = --device ]; then device=$2; else image=$2; fi
        shift 2
        ;;
    --dry-run)
        dry_run=1
        shift
        ;;
    -h | --help)
        sed -n '3,15s/^# \{0,1\}//p' "$0"
        exit
        ;;
    --)
        shift
        break
        ;;
    *)
        fail 2 "unknown argument '$1'; allowed are --device, --image, --dry-run," \
            "--help, and a command after --"
        ;;
    esac
done
case $device in
auto) if has_gpu; then device=gpu; else device=cpu; fi ;;
gpu) has_gpu || [ -n "$dry_run" ] || fail 1 "--device is gpu, and nvidia-smi finds none" ;;
cpu) ;;
*) fail 2 "--device is '$device'; allowed are auto, gpu and cpu" ;;
esac

build=()
if [ -z "$image" ]; then
    image=vllm-nwor:dev-$device
    dockerfile=docker/Dockerfile
    [ "$device" = gpu ] || dockerfile=docker/Dockerfile.cpu
    build=(docker build --target build -f "$ROOT/$dockerfile" -t "$image" "$ROOT")
fi

run=(docker run --rm --interactive --init --user "$(id -u):$(id -g)")
[ ! -t 0 ] || run+=(--tty)
# --ipc: vLLM's processes share memory, more than a container's default of 64 MB.
run+=(--ipc host)
[ "$device" != gpu ] || run+=(--gpus all)
run+=(--mount "type=bind,source=$ROOT,target=/src" --workdir /src)
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

show() { # as one line that a shell takes back
    local line
    printf -v line '%q ' "$@"
    echo "${line% }"
}

if [ -n "$dry_run" ]; then
    [ ${#build[@]} -eq 0 ] || show "${build[@]}"
    show "${run[@]}"
    exit
fi
command -v docker >/dev/null ||
    fail 1 "docker is not installed, or not on PATH; --dry-run shows what would run"
docker version >/dev/null 2>&1 ||
    fail 1 "docker is here, but its daemon does not answer: is it running, may you use it?"
[ ${#build[@]} -eq 0 ] || "${build[@]}"
exec "${run[@]}"
