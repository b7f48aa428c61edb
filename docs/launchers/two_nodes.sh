#!/usr/bin/env bash
# Two nodes on one machine: two launchers that find each other as they would over a network, with a rank each.
#
#     LIMIT=300 docs/launchers/two_nodes.sh train.py --config resnet_int8.yaml device=cpu
#
# PYTHON is the interpreter, LIMIT the seconds that it may take. If one node fails, so does the other.
set -euo pipefail

python=${PYTHON:-python}
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')

nodes=()
# Asked to end, a launcher ends its rank; killed, it would leave it behind.
trap 'kill -TERM "${nodes[@]}" 2>/dev/null || true; wait' EXIT
for _ in 0 1; do
    timeout --kill-after=40 "${LIMIT:-600}" "$python" -m torch.distributed.run \
        --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id "$port" --rdzv-endpoint "localhost:$port" \
        --local-addr localhost "$@" &
    nodes+=($!)
done
wait -n # the status of the first that ends; by set -e its failure ends the other
wait -n
