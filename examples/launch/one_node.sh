#!/usr/bin/env bash
# One node, all its GPUs (or GPUS=4). Restarted up to three times after a failure, from the last whole checkpoint.
#
#   examples/launch/one_node.sh examples/math/qwen2.5-math-7b.yaml --model.path models/Qwen2.5-Math-7B ...
set -euo pipefail
GPUS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
exec python -m d3s_megatron.launch --nproc "$GPUS" --max-restarts 3 -- --launch.world_size "$GPUS" --config "$@"
