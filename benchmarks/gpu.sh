#!/usr/bin/env bash
# What needs a GPU, 9 minutes at most in one call: benchmarks/gpu.sh [--dry] [--out FOLDER] [STAGE ...]; README.md says
# more. Works from a checkout with nothing installed but the dependencies, and without network: wheels of what is missing
# are taken from the folder .whl, if there is one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
if compgen -G '.whl/*.whl' > /dev/null; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target .whl/installed .whl/*.whl
  PYTHONPATH="$PYTHONPATH:$PWD/.whl/installed"
fi
exec "$python" -m benchmarks.gpu --limit $((540 - SECONDS)) "$@"
