#!/usr/bin/env bash
# Install hpcfl and the pinned packages into .venv, once; sourced by the other scripts.
#
#     bash jobs/environment.sh EXTRAS        EXTRAS of pyproject.toml, such as mpich or mpich,test; none: the site's MPI
#     source jobs/environment.sh EXTRAS      the same, in a script
#
# Leaves the shell in the repository root, with the programs of .venv first in PATH.
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=${1:-}
stamp=.venv/.installed-$extras
python=.venv/bin/python

# Packages of the user's home or of a cluster's modules would shadow the pinned ones.
export PYTHONNOUSERSITE=1
unset PYTHONPATH PYTHONHOME
# Otherwise every rank would compile the package anew.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=1
export PATH="$PWD/.venv/bin:$PATH"

find_python() {
    local candidate
    for candidate in python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or newer in PATH (tried python3.11, python3); install one, or on a cluster load its module, and run this again" >&2
    return 1
}

create_venv() {
    local base_python
    base_python=$(find_python)
    echo "hpcfl: creating .venv with $("$base_python" --version)"
    if ! "$base_python" -m venv --clear .venv; then
        echo "error: $base_python cannot create a virtual environment; on Debian and Ubuntu install python3-venv, and run this again" >&2
        return 1
    fi
}

install() {
    local pip=("$python" -m pip install --quiet --quiet --no-user --disable-pip-version-check --constraint jobs/constraints.txt)
    echo "hpcfl: installing hpcfl${extras:+[$extras]} and its pinned packages into .venv; the first time takes some minutes"
    # Without isolation the build too uses pinned packages.
    "${pip[@]}" setuptools
    "${pip[@]}" --no-build-isolation --editable ".${extras:+[$extras]}"
    echo "hpcfl: .venv is ready after $SECONDS s"
}

runs() {
    "$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# The place is part of the fingerprint: an editable installation does not survive a move.
fingerprint=$({ echo "$PWD"; cat pyproject.toml jobs/constraints.txt; } | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$fingerprint" ] || ! runs; then
    # Stamps of other packages, or of an installation that is interrupted now, would be taken for whole later.
    for other in .venv/.installed-*; do
        [ "$(cat "$other" 2>/dev/null)" = "$fingerprint" ] || rm -f "$other"
    done
    rm -f "$stamp"
    runs || create_venv
    install
    echo "$fingerprint" >"$stamp"
fi
