#!/usr/bin/env bash
# Install hpcfl with an MPI and the test tools into .venv (the first time) and run the tests.
#
#     bash jobs/test.sh                       all but soak tests: side by side, then the collective ones as 3 MPI ranks
#     bash jobs/test.sh -m quick              half a minute, while one works
#     bash jobs/test.sh -m gpu                those that need a GPU; each is skipped where there is none
#     bash jobs/test.sh -m soak               the soak tests: long runs and long sweeps, minutes each
#     bash jobs/test.sh PYTEST OPTIONS        those that the options choose, without MPI ranks
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" mpich,test

# A file's tests stay together, since they share runs; tests/conftest.py has the longest files first. One worker more than
# there are cores: tests of jobs, signals and timeouts wait for much of their time.
python -m pytest --numprocesses "$(($(env -u OMP_NUM_THREADS nproc) + 1))" --maxprocesses 5 --dist loadfile --no-loadscope-reorder "$@"
[ $# -eq 0 ] || exit 0

echo "hpcfl: the collective tests, as 3 MPI ranks; rank 0 prints, the others only if a rank fails"
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
# shellcheck disable=SC2016  # expanded by each rank
one_rank='[ "$PMI_RANK" = 0 ] || exec >"$0/rank$PMI_RANK.txt" 2>&1; exec "$@"'
# Reading all other tests would take each rank longer than doing these.
mapfile -t collective < <(grep -rl --include='test_*.py' '^@pytest.mark.mpi' tests)
# A rank that fails before a collective leaves the others waiting in it.
timeout --foreground --kill-after=10 900 mpirun -n 3 bash -c "$one_rank" "$logs" \
    python -m pytest --with-mpi -m mpi -rfE -p no:cacheprovider "${collective[@]}" || {
    exit_code=$?
    cat "$logs"/rank*.txt
    exit "$exit_code"
}
