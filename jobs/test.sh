#!/usr/bin/env bash
# Install hpcfl with an MPI and the test tools into .venv (the first time) and run the tests.
#
#     bash jobs/test.sh                       all but soak and nodes, the collective ones as 1 and 5 MPI ranks (messages: 2 too)
#     bash jobs/test.sh -m quick              half a minute, while one works
#     bash jobs/test.sh -m gpu                those that need a GPU; each is skipped where there is none
#     bash jobs/test.sh -m soak               the soak tests: long runs and long sweeps, minutes each
#     bash jobs/test.sh -m nodes              all networks, MPIs and faults on several simulated nodes, an hour
#     bash jobs/test.sh PYTEST OPTIONS        those that the options choose
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" mpich,test

# The tests write thousands of small files, which takes a fifth less time in memory, where that has 4 GB for them.
room_kb=$(df --output=avail /dev/shm 2>/dev/null | tail -n 1) || room_kb=0
if [ -z "${TMPDIR:-}" ] && [ "${room_kb:-0}" -gt 4000000 ]; then
    TMPDIR=$(mktemp --directory --tmpdir=/dev/shm)
    export TMPDIR
    trap 'rm -rf "$TMPDIR"' EXIT
fi

# A file's tests stay together, since they share runs; tests/conftest.py has the longest files first. Two workers more than
# there are cores: tests of jobs, signals and timeouts wait for much of their time.
python -m pytest --numprocesses "$(($(env -u OMP_NUM_THREADS nproc) + 2))" --maxprocesses 5 --dist loadfile --no-loadscope-reorder "$@"
