#!/usr/bin/env bash
# n nodes without a scheduler: the same line on every node, with its own NODE_RANK.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 examples/launch/nodes.sh CONFIG.yaml --model.path ... --train.output_dir ...
#
# train.output_dir must lie on a file system that all nodes share.
set -euo pipefail
: "${NNODES:?set the number of nodes}"
: "${NODE_RANK:?set 0 on the first node, 1 on the second, ...}"
: "${MASTER_ADDR:?set the name of the first node, as the others reach it}"
export NPROC_PER_NODE=${NPROC_PER_NODE:-8}
exec python -m d3s_megatron.launch --max-restarts 3 -- \
  --launch.world_size "$((NNODES * NPROC_PER_NODE))" --config "$@"
