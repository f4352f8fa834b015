#!/usr/bin/env bash
# What the job scripts have in common; they source it. Needs SLURM, and hpcfl in .venv or in the loaded modules' Python.
#
#     source jobs/cluster.sh
#     launch WORDS OF hpcfl ...; end_job $?
#
# LAUNCHER       mpirun (the default where there is one), srun, or a whole launcher such as LAUNCHER="mpiexec -n 9".
# MAX_REQUEUES   how often in a row a job is requeued without a new round being saved (3).

cd "${SLURM_SUBMIT_DIR:-.}" || exit
export PATH="$PWD/.venv/bin:$PATH" PYTHONNOUSERSITE=1 OMP_NUM_THREADS=1
# after sbatch --export=NONE, srun would give ranks none of this
export SLURM_EXPORT_ENV=ALL
# Open MPI gives ranks a terminal, and a bar on it would fill the job's output.
export TTY_COMPATIBLE=0
# they would hide jobs from squeue, or give its times another form
unset "${!SQUEUE_@}" SLURM_TIME_FORMAT

job=$SLURM_JOB_ID
# of a task of an array, SLURM_JOB_ID may be the whole array's
task=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
task=${task:-$job}
script=${SLURM_JOB_NAME:-hpcfl}
max_requeues=${MAX_REQUEUES:-3}
stop_wanted=
signals=0
steps=0

# hpcfl says in `ready` that a signal stops it, in `saved` which round it has saved, and in `cell` which cell of a
# table it has begun, and nothing once all have had their turn.
all_notes="$PWD/runs/.jobs"
export HPCFL_JOB_NOTES="$all_notes/$job"

say() { echo "hpcfl job $job: $*"; }

note() { cat "$HPCFL_JOB_NOTES/$1" 2>/dev/null; }

# Say how to go on: --fresh would move aside what this job has saved.
again() {
    if [ -n "$(note saved)" ]; then
        echo "submit the command again, without --fresh, to resume"
    else
        echo "submit the command again"
    fi
}

# Without notes, a requeued job with --fresh would start over.
end_without_notes() {
    say "cannot write $HPCFL_JOB_NOTES; free space, and $(again)" >&2
    exit 74
}

# SLURM's controller may be away for a while, as when it restarts: ask it again.
patiently() {
    local pause
    for pause in 1 2 4 8 16; do
        "$@" && return
        sleep "$pause"
    done
    "$@"
}

# Notes are needed while a job may start again, also after a fault and by hand.
forget_old_jobs() {
    find "$all_notes" -mindepth 1 -maxdepth 1 -user "$(id -u)" -not -name "$job" -mtime +60 -exec rm -rf {} +
}

# Count the starts in a row without a new round; those that SLURM requeued by itself count too.
count_start() {
    requeues=0
    if [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ]; then
        # SLURM may have given the number before
        rm -f "$HPCFL_JOB_NOTES"/*
    elif [ "$(note saved)" = "$(note saved_before)" ]; then
        requeues=$(($(note requeues) + 1))
    fi
    saved_before=$(note saved)
    echo "$saved_before" >"$HPCFL_JOB_NOTES/saved_before" || end_without_notes
    echo "$requeues" >"$HPCFL_JOB_NOTES/requeues" || end_without_notes
    if [ "$requeues" -gt "$max_requeues" ]; then
        give_up
        exit 1
    fi
}

give_up() {
    say "requeued $requeues times in a row without a new round, and ends: a round and its checkpoint may take longer" \
        "than the job may run, or it is pre-empted before. Give it more time (--time) or starts (MAX_REQUEUES before" \
        "sbatch), and $(again)" >&2
}

# SLURM before 23.02 does not say when the time is up; hpcfl stops by itself before that.
tell_end_time() {
    local end
    if [ -n "${SLURM_JOB_END_TIME:-}" ]; then return; fi
    end=$(patiently squeue --noheader --jobs="$task" --format=%e 2>/dev/null)
    # to date, no words at all are this morning
    if [ -n "$end" ] && end=$(date --date="$end" +%s 2>/dev/null); then export SLURM_JOB_END_TIME=$end; fi
}

# Print the --mpi type of srun that fits the MPI of mpi4py.
mpi_type() {
    local listed wanted type
    listed=" $(srun --mpi=list 2>&1 | tr -c 'a-z0-9_' ' ') "
    case $(python -m mpi4py --mpi-lib-version | tr -d '\0') in
        *"Open MPI"*) wanted="pmix" ;;
        *"MPICH configure:"*pmix*) wanted="pmi2 pmix" ;;
        # as from PyPI
        *"MPICH configure:"*) wanted="pmi2" ;;
        *) wanted="pmi2 pmix" ;;
    esac
    for type in $wanted; do
        case $listed in *" $type "*) echo "$type"; return ;; esac
    done
    say "srun knows none of the --mpi types that join the ranks of this MPI ($wanted); use LAUNCHER=mpirun" >&2
    return 2
}

# MPICH names its shared memory after the job's step, and would meet what a killed step of the same number has left.
# `steps` is how many may have left something.
skip_steps() {
    for ((; steps < $(note steps) + 0; steps++)); do srun --ntasks=1 --nodes=1 true; done
}

choose_launcher() {
    local type
    if [ -z "${LAUNCHER:-}" ]; then
        if command -v mpirun >/dev/null; then LAUNCHER=mpirun; else LAUNCHER=srun; fi
    fi
    case $LAUNCHER in
        mpirun)
            launcher=(mpirun -n "${SLURM_NTASKS:-1}")
            ;;
        srun)
            type=$(mpi_type) || exit
            # A rank that dies leaves the others waiting; ranks that stop orderly do not end at the same moment.
            launcher=(srun --mpi="$type" --kill-on-bad-exit=0 --wait=30)
            skip_steps
            ;;
        *) read -r -a launcher <<<"$LAUNCHER" ;;
    esac
    case ${launcher[0]} in
        # srun gives a rank one core unless it is told again
        srun | */srun) export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} ;;
        # the srun by which mpirun starts all ranks of a node would leave them one core together
        # and were it to speak PMIx there, MPICH would meet two
        *) unset SRUN_CPUS_PER_TASK SLURM_CPUS_PER_TASK; export SLURM_CPU_BIND=none SLURM_MPI_TYPE=none ;;
    esac
}

# mpirun passes SIGUSR1 on to the ranks with mpich and with openmpi (mpich dies of SIGUSR2, openmpi kills the ranks
# at SIGTERM), and so does srun. SIGTERM is left alone: scancel sends it, and a cancelled job must not be requeued.
stop_soon() {
    stop_wanted=yes
    signals=$((signals + 1))
}

# Ranks that still start die of a signal, so it waits for them.
pass_signals_on() {
    if [ "$signals" -gt 0 ] && [ -e "$HPCFL_JOB_NOTES/ready" ]; then
        signals=$((signals - 1))
        kill -USR1 "$1" 2>/dev/null
        say "asked to stop at the end of the round"
    fi
}

# Run hpcfl with these words on all ranks; return its exit code.
launch() {
    local launcher_pid exit_code clean_steps
    trap stop_soon USR1
    if [ -n "$stop_wanted" ]; then return 75; fi
    clean_steps=$(($(note steps) + 0))
    steps=$((steps + 1))
    echo "$steps" >"$HPCFL_JOB_NOTES/steps"
    rm -f "$HPCFL_JOB_NOTES/ready"
    "${launcher[@]}" python -m hpcfl.main "$@" &
    launcher_pid=$!
    # No trap may meet the `wait` for the launcher: bash loses the exit code when both happen at once.
    while kill -0 "$launcher_pid" 2>/dev/null; do
        pass_signals_on "$launcher_pid"
        sleep 1
    done
    trap '' USR1
    wait "$launcher_pid"
    exit_code=$?
    case $exit_code in 0 | 2 | 3 | 75) echo "$clean_steps" >"$HPCFL_JOB_NOTES/steps" ;; esac
    return "$exit_code"
}

# End the job script with this exit code of hpcfl; at 75 the job is requeued.
end_job() {
    local exit_code=$1
    # where nothing is saved, there is nothing to remember
    if [ "$exit_code" -eq 0 ] || { [ "$exit_code" -ne 75 ] && [ -z "$(note saved)" ]; }; then
        rm -rf "$HPCFL_JOB_NOTES"
    fi
    if [ "$exit_code" -ne 75 ]; then exit "$exit_code"; fi
    if [ "$(note saved)" = "$saved_before" ] && [ "$requeues" -ge "$max_requeues" ]; then
        give_up
        exit 75
    fi
    # scancel and SLURM's own requeue have taken the job over before the ranks have stopped
    if [ "$(patiently squeue --noheader --jobs="$task" --format=%T)" = RUNNING ]; then
        say "stopped at a checkpoint (exit code 75), is requeued"
        patiently scontrol requeue "$task" && exit 0
    fi
    say "stopped at a checkpoint (exit code 75), not requeued; $(again)" >&2
    exit 75
}

mkdir -p "$HPCFL_JOB_NOTES" || end_without_notes
trap stop_soon USR1
forget_old_jobs
count_start
tell_end_time
choose_launcher
say "$script, start $((${SLURM_RESTART_COUNT:-0} + 1)) on ${SLURM_JOB_NODELIST:-?}: ${launcher[*]} python -m hpcfl.main"
