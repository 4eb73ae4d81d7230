#!/bin/bash
# Start a command on several hosts over ssh, one process per host; the first is process 0. Ctrl-C: all save and exit.
#
#   HOSTS="node0 node1" deploy/ssh.sh mjax train --config llama3_8b --mesh.data 16 --data.path /shared/data/corpus \
#       --runs /shared/runs
#
# Each host needs ssh without a password, the current folder, and the same mjax; give the path of mjax, such as
# .venv/bin/mjax, if a login finds none. Variables: HOSTS, separated by spaces; PORT of process 0 (29500), which the
# others must reach.

set -uo pipefail

read -ra hosts <<<"${HOSTS:?names no hosts; try HOSTS="node0 node1"}"
address=${hosts[0]#*@}:${PORT:-29500}
pid=.$HOSTNAME-$$.pid # of process 0, on its host

quoted() { printf " '%s'" "${@//\'/\'\\\'\'}"; } # for any shell of a host

# SIGTERM to one process stops all after the same saved step.
stop() { ssh "${hosts[0]}" "kill -TERM \$(cat$(quoted "$PWD/$pid"))"; }
trap stop INT TERM

processes=()
for index in "${!hosts[@]}"; do
    there="cd$(quoted "$PWD")"
    ((index)) || there+=" && echo \$\$ >$pid"
    there+=" && exec env JAX_COORDINATOR_ADDRESS=$address JAX_NUM_PROCESSES=${#hosts[@]} JAX_PROCESS_ID=$index"
    # Background jobs of a script ignore Ctrl-C, so ssh stays to show how the processes end.
    ssh "${hosts[index]}" "$there$(quoted "$@")" &
    processes+=($!)
done

code=0
for process in "${processes[@]}"; do
    # `wait` also returns when a trap has run, before the process has ended.
    while wait "$process"; ended=$?; kill -0 "$process" 2>/dev/null; do :; done
    ((ended > code)) && code=$ended
done
ssh "${hosts[0]}" "rm -f$(quoted "$PWD/$pid")"
exit "$code"
