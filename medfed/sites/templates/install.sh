#!/bin/sh
# Makes a Python environment that holds medfed, from this folder: sh install.sh [ENVIRONMENT]
# PYTHON names another Python than python3. WHEELS names a folder of wheels, for a machine without
# a network. Every file is compared with its hash, here and by pip.
set -eu
cd "$(dirname "$0")"
environment=${1:-/opt/medfed}
if [ -e "$environment" ]; then
    echo "error: $environment is there already; name a new folder." >&2
    exit 1
fi
if command -v sha256sum > /dev/null; then
    sha256sum --check --quiet SHA256SUMS
else
    shasum -a 256 --check SHA256SUMS > /dev/null
fi
"${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: medfed needs Python 3.11 or newer; name it by PYTHON=python3.12, for example." >&2
    exit 1
}
"${PYTHON:-python3}" -m venv "$environment"
"$environment/bin/python" -m pip install --quiet --require-hashes --only-binary :all: --no-deps \
    ${WHEELS:+--no-index --find-links "$WHEELS"} --find-links wheels --requirement requirements.txt
"$environment/bin/python" -m pip check
"$environment/bin/medfed" doctor
