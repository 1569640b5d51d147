#!/usr/bin/env bash
# ResNet-50 in PARDON's setup on random images of PACS's size: 100 clients with 57 images each, 20
# per round, 224 px. Prints seconds by phase and the share of the measured peak, in float32, TF32,
# bfloat16, and bfloat16 with cuDNN's fastest algorithms. Requires a CUDA device, but no data and no
# weights. The first argument is the method, fedavg by default.
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
