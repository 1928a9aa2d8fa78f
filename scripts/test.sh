#!/usr/bin/env bash
# Lint and the whole test suite in the project's own environment.
#   ./scripts/test.sh [pytest arguments]
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
exec "$venv/bin/python" -m pytest -n 2 "$@"
