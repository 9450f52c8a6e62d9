#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fetches Prometheus for the tests, if prometheus and promtool are not on PATH: unpacks
# Debian's or Ubuntu's package into the cache folder of tools/setup/make_models.py, without
# installing or starting a service. As root it may update apt's lists. Exit status: 0
# Prometheus is there.
set -eu

if command -v prometheus && command -v promtool; then exit; fi
target=${NWOR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm-nwor}/prometheus
if [ ! -x "$target/usr/bin/promtool" ]; then
    if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
        echo "prometheus: apt-get or dpkg is missing: install prometheus and promtool with" \
            "this system's package manager" >&2
        exit 1
    fi
    mkdir -p "$(dirname "$target")"
    folder=$(mktemp -d "$target-XXXXXX")
    trap 'rm -rf "$folder"' EXIT
    cd "$folder"
    # Without package lists, which only root can create, the download fails.
    if ! apt-get download -q prometheus; then
        [ "$(id -u)" = 0 ] || exit 1
        apt-get update -q
        apt-get download -q prometheus
    fi
    dpkg -x ./*.deb unpacked
    rm -rf "$target"
    mv unpacked "$target"
fi
echo "prometheus: in $target"
