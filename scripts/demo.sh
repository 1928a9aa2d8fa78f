#!/usr/bin/env bash
# The budget curve of a 12-layer Llama, predicted on CPU: plain torch, the overlay's two
# modes, and checkpointing every layer.  Writes out/demo.json and out/demo.png.
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
echo "demo: lowering 25 plans on two processes; takes about six minutes on two cores"
"$venv/bin/python" scripts/budget_curve.py --predict --model llama --layers 12 \
    --budgets 0,0.02,0.05,0.1,0.2,0.3,0.5,1 --methods stock,light,all,ac1 \
    --jobs 2 --out out/demo.json "$@"
