#!/usr/bin/env bash
# ResNet-50 in PARDON's frame on random images of PACS's size: 100 clients of 57, 20 a round, 224 px.
# Prints seconds by phase and the share of the measured peak, in both precisions. Wants a CUDA device.
set -euo pipefail
for precision in 32-true bf16-mixed; do
  python -m feddg_bench profile --method "${1:-fedavg}" --dataset pacs --recipe pardon \
    --synthetic 57 --device cuda backbone.pretrained=false train.precision=$precision
done
