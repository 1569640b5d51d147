#!/usr/bin/env bash
# ResNet-50 in PARDON's frame on random images of PACS's size: 100 clients of 57, 20 a round, 224 px.
# Prints seconds by phase and the share of the measured peak, in float32, TF32, bfloat16, and bfloat16
# with cuDNN's fastest algorithms. Needs a CUDA device, no data and no weights. Method: the first
# argument, fedavg by default.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
bf16=train.precision=bf16-mixed
for arithmetic in train.precision=32-true gpu.tf32=true $bf16 "$bf16 gpu.autotune=true gpu.deterministic=false"; do
  echo "== ${1:-fedavg}, $arithmetic"
  "$python" -m feddg_bench profile --method "${1:-fedavg}" --dataset pacs --recipe pardon \
    --synthetic 57 --device cuda backbone.pretrained=false $arithmetic
done
