#!/bin/sh
# What to run when a GPU is at hand: builds with CUDA, checks every op, measures, and takes one D3S step on NCCL.
# Under 8 minutes on one GPU, and up to 8 more where vLLM is installed (NCCL to a server needs two GPUs); results go to
# the folder OUT (default runs/gpu).
#   sh tests/gpu/run.sh [OUT]
# PYTHON names the interpreter (default .venv/bin/python or python3); it needs the package's requirements.
set -eu
cd "$(dirname "$0")/../.."
out=${1:-runs/gpu}
mkdir -p "$out"
if [ -n "${PYTHON:-}" ]; then :; elif [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi

echo "== build"
D3S_CUDA=1 timeout 180 "$PYTHON" -m pip install -q -e . --no-build-isolation --no-deps
"$PYTHON" -m d3s_megatron.ops | tee "$out/state.txt"

echo "== every op against float64 and the CPU"
timeout 150 "$PYTHON" -m pytest -q -m gpu tests/gpu/test_ops_gpu.py

echo "== times"
timeout 90 "$PYTHON" tests/gpu/bench_gpu.py "$out/ops.json"

echo "== one D3S step on NCCL"
step="$out/step"
rm -rf "$step"
"$PYTHON" -m d3s_megatron.data.arithmetic --out "$step/data" --seed 0
"$PYTHON" examples/arithmetic/warm_start.py --data "$step/data" --out "$step/warm_start" --seed 0
timeout 120 "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 1 -m d3s_megatron.train \
    examples/arithmetic/d3s.yaml --model.path "$step/warm_start" --actor.tensor_model_parallel_size 1 \
    --data.train_path "$step/data/train.jsonl" --data.eval_path "$step/data/eval.jsonl" \
    --train.output_dir "$step" --train.steps 1 --train.overwrite true
test -s "$step/summary.json"
if "$PYTHON" -c "import vllm" 2>/dev/null; then
    echo "== vLLM: sleep and wake, weights by broadcast, a run in bfloat16"
    timeout 480 "$PYTHON" -m pytest -q -m gpu tests/gpu/test_vllm_gpu.py
fi
echo "all done: $out"
