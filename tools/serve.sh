#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a server, the command given, and ends all of its processes when this one is
# ended: while vLLM starts it does not act on SIGTERM, and whoever sends it to `make`
# would leave a server behind. SIGTERM first; what is left after GRACE_S seconds (10), or
# after the server itself, gets SIGKILL.
set -u

setsid "$@" &
server=$!

# shellcheck disable=SC2329 # the traps call it
stop() {
    trap '' TERM INT HUP
    kill -TERM "$server" 2>/dev/null
    left=${GRACE_S:-10}
    while [ "$left" -gt 0 ] && kill -0 "$server" 2>/dev/null; do
        sleep 1
        left=$((left - 1))
    done
    kill -KILL "-$server" 2>/dev/null
    exit "$1"
}
trap 'stop 143' TERM HUP
trap 'stop 130' INT
wait "$server"
status=$?
kill -KILL "-$server" 2>/dev/null
exit "$status"
