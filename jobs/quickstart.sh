#!/usr/bin/env bash
# Install hpcfl with an MPI of its own into .venv (the first time) and run it: one server, eight workers.
#
#     bash jobs/quickstart.sh                                        pFedLA on the bundled digits
#     bash jobs/quickstart.sh CONFIG.yaml key.sub=value ...          any run; paths count from the repository root
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" mpich
exec mpirun -n 9 python -m hpcfl.main "$@"
