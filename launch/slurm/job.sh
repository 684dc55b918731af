# What both job scripts share: sourced by them from the folder where sbatch was called, not run.
#
#   prepare CONFIG OVERRIDES...  -> python, replicas, ranks (per replica), logs, and program: training, or with
#                                NOLOCO_CHECK=1 the check of the very same launch; checks the number of tasks
#   run_ranks WORDS...           one training process per task, in the background; then waits for all of them
#
# After run_ranks: `status` is srun's, the highest of its tasks'. Each script has its own function out_of_time, which is
# called when the time limit is near.

fail() {
  echo "$SLURM_JOB_NAME: $*" >&2
  exit 2
}

prepare() {
  python=${PYTHON:-$SLURM_SUBMIT_DIR/.venv/bin/python}
  [ -x "$python" ] || fail "no Python at $python: run make install in $SLURM_SUBMIT_DIR, or set PYTHON"
  local sizes
  sizes=$("$python" -m noloco_mega sizes --config "$@") || exit 2
  read -r replicas ranks <<<"$sizes"
  local wanted=$((replicas * ranks))
  [ -z "${NOLOCO_REPLICA:-}" ] || wanted=$ranks
  if [ "${SLURM_NTASKS:-1}" -ne "$wanted" ]; then
    fail "this job has ${SLURM_NTASKS:-1} tasks, but the config needs $wanted (one per GPU): sbatch --nodes=N" \
      "--ntasks-per-node=GPUS --gpus-per-node=GPUS with N·GPUS = $wanted"
  fi
  program=noloco_mega.train
  [ -z "${NOLOCO_CHECK:-}" ] || program=noloco_mega.preflight
  logs=${NOLOCO_LOGS:-logs}/${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
  mkdir -p "$logs"
  # The address that each task listens on: an interface's, or the one on its way to the rendezvous.
  [ -n "${NOLOCO_IFNAME:-}" ] || export NOLOCO_HOST=auto
  # Each task must see all of the job's GPUs on its node (so NVLink between them works) and takes the one of its own number
  # there. --gpus-per-node does that; a binding, even --gpu-bind=none, changes or drops CUDA_VISIBLE_DEVICES.
  unset SLURM_GPU_BIND SLURM_GPUS_PER_TASK
  # Settings of GPU nodes. One hardware queue, so that kernels and transfers start in the order issued:
  export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
  # Memory in segments that grow, against fragmentation by activations of many sizes:
  export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
  # A core of its own for each rank's threads; data loading and exchanges are threads, not OpenMP:
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
}

run_ranks() {
  trap out_of_time USR1
  # --no-kill and --kill-on-bad-exit=0: a lost node or a failed task ends no other task. --wait=0: nor does a finished one.
  srun --no-kill --kill-on-bad-exit=0 --wait=0 --distribution=block \
    --open-mode=append --output="$logs/rank_%t.log" "$@" &
  local step=$!
  # `wait` returns early when a signal comes in; srun is then still there.
  while kill -0 "$step" 2>/dev/null; do wait "$step"; done
  wait "$step"
  status=$?
}
