#!/usr/bin/env bash
# What needs a GPU, in under 10 minutes: benchmarks/gpu.sh [--dry] [--out FOLDER] [STAGE ...]; README.md says more.
# Works from a checkout with nothing installed but the dependencies, and without network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
