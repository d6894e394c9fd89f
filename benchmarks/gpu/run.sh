#!/usr/bin/env bash
# Measures this checkout on a machine with a GPU: see docs/gpu.md.
#
#     benchmarks/gpu/run.sh --out gpu-results
#     benchmarks/gpu/run.sh --device cpu --source DIR --out rehearsal
#
# Nothing is downloaded. What the machine lacks is carried in a folder (CARRIED, by default `carried` beside the checkout):
#     carried/packages   those Python packages that the machine lacks, unpacked; never torch, which belongs to a driver
#     carried/models     SmolLM2-135M-Instruct.Q4_1.gguf
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
carried=${CARRIED:-$PWD/../carried}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [[ -d $carried/packages ]]; then
    export PYTHONPATH="$PYTHONPATH:$carried/packages"
fi
if [[ -d $carried/models ]]; then
    export FORETOKEN_MODELS=${FORETOKEN_MODELS:-$carried/models}
fi
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
exec "${PYTHON:-python3}" -m studies.gpu "$@"
