#!/usr/bin/env bash
# Install hpcfl with an MPI and the test tools into .venv (the first time) and run all tests.
#
#     bash jobs/test.sh [PYTEST OPTIONS]      the options go to the first of the two runs
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" mpich,test

python -m pytest "$@"

echo "hpcfl: the tests again, as 3 MPI ranks; rank 0 prints, the others only if a rank fails"
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
# shellcheck disable=SC2016  # expanded by each rank
one_rank='[ "$PMI_RANK" = 0 ] || exec >"$0/rank$PMI_RANK.txt" 2>&1; exec "$@"'
# A rank that fails before a collective leaves the others waiting in it.
timeout --foreground --kill-after=10 900 mpirun -n 3 bash -c "$one_rank" "$logs" \
    python -m pytest --with-mpi -rfE -p no:cacheprovider || {
    exit_code=$?
    cat "$logs"/rank*.txt
    exit "$exit_code"
}
