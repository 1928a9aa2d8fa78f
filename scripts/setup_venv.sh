# Sourced by demo.sh and test.sh: makes or reuses the project's virtual environment.
#   TORCH_VERSION   torch release to install (default: "main" of pins.json)
#   VENV            its folder (default: .venv in the project)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
pinned='import json; print(json.load(open("torch_overlay/pins.json"))["main"])'
torch_version=${TORCH_VERSION:-$(python3 -c "$pinned")}
venv=${VENV:-$root/.venv}
stamp="$venv/.torch_overlay_setup"
# Anything that changes what is installed changes this line.
wanted="torch $torch_version, setup.py $(cksum < setup.py)"

fail() {
    echo "setup: $1" >&2
    exit 1
}

if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    echo "setup: using $venv (torch $torch_version)"
else
    echo "setup: making $venv with torch $torch_version (about 6 GB on Linux x86-64)"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "Python 3.10 or newer is needed, this is $(python3 --version)"
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv" ||
        fail "python3 -m venv failed; on Debian: apt-get install python3-venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check \
        "torch==$torch_version" "setuptools>=68" wheel ||
        fail "pip could not install torch $torch_version"
    "$venv/bin/pip" install --quiet --disable-pip-version-check \
        --no-build-isolation -e ".[test]" || fail "pip could not install the project"
    echo "$wanted" > "$stamp"
fi
"$venv/bin/python" -m torch_overlay status ||
    fail "the overlay does not fit torch $torch_version"
