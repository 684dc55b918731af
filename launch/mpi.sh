#!/usr/bin/env bash
# A run by MPI's launcher (MPICH and its relatives, or Open MPI), one launch per replica.
#
#   launch/mpi.sh CONFIG [--hostfile FILE] [--mpi4py] [--together] [MPIEXEC OPTIONS] [-- --set KEY=VALUE ...]
#
#   --hostfile FILE   "HOST slots=GPUS" per line; replicas take slots in this order. Without it all is on this machine
#   --mpi4py          ask MPI itself for ranks, where the launcher sets none of the variables of MPICH, Open MPI or SLURM
#   --together        one launch for the whole run: mpiexec ends all its processes when one fails, so the replicas then
#                     fail together
#
# Without NOLOCO_RENDEZVOUS one is served here, on NOLOCO_RENDEZVOUS_HOST (default: loopback, for one machine). MPIEXEC
# names another launcher. The secret is a file, at the same path on every host.
set -euo pipefail
script=launch/mpi.sh
source "$(dirname "$0")/common.sh"
if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then usage; fi
config=$1
shift

together= hostfile= options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    --together) together=1 ;;
    --mpi4py) export NOLOCO_RANKS=mpi4py ;;
    --hostfile) hostfile=$2; shift ;;
    --hostfile=*) hostfile=${1#*=} ;;
    *) options+=("$1") ;;
  esac
  shift
done
[ $# -eq 0 ] || shift

mpiexec=${MPIEXEC:-mpiexec}
command -v "$mpiexec" >/dev/null || fail "no $mpiexec here: load your cluster's MPI module, install mpich or openmpi-bin, or" \
  "set MPIEXEC"
prepare "$config" "$@"
words=(--config "$config")
[ -z "$together" ] || words+=(--together)
if [ -n "$hostfile" ]; then
  [ -n "${NOLOCO_RENDEZVOUS:-}${NOLOCO_RENDEZVOUS_HOST:-}" ] || fail "set NOLOCO_RENDEZVOUS_HOST to an address of this" \
    "machine that all hosts reach, to serve the rendezvous here, or NOLOCO_RENDEZVOUS=HOST:PORT of a running one"
  shares=$("$python" -m noloco_mega hosts "${words[@]}" --hostfile "$hostfile" "$@")
  mapfile -t shares <<<"$shares"
fi
serve_rendezvous "${NOLOCO_RENDEZVOUS_HOST:-127.0.0.1}"

openmpi=
! "$mpiexec" --version 2>&1 | grep -qi 'open.\?mpi' || openmpi=1
count=$replicas
[ -z "$together" ] || count=1 ranks=$((replicas * ranks))
for ((replica = 0; replica < count; replica++)); do
  environment=(-u NOLOCO_REPLICA) exported=() where=()
  [ -n "$together" ] || environment=(NOLOCO_REPLICA="$replica")
  if [ -n "$hostfile" ]; then
    IFS=@ read -ra entries <<<"${shares[$replica]}"
    numbers=${entries[0]#*:} list=
    for entry in "${entries[@]}"; do
      [ "${entry#*:}" = "$numbers" ] || fail "a replica must have the same slots on each of its hosts; replica $replica" \
        "has ${shares[$replica]}"
      list+=,${entry%%:*}:$(tr , '\n' <<<"${entry#*:}" | wc -l)
    done
    environment+=(CUDA_VISIBLE_DEVICES="$numbers")
    # An address of its own on every host, unless the user names an interface.
    [ -n "${NOLOCO_IFNAME:-}" ] || environment+=(NOLOCO_HOST=auto)
    where=(-hosts "${list#,}")
    [ -z "$openmpi" ] || where=(--host "${list#,}")
  elif [ -z "$together" ]; then
    gpus=$(gpus_of "$replica")
    [ -z "$gpus" ] || environment+=("$gpus")
  fi
  if [ -n "$openmpi" ]; then
    # MPICH's launcher hands the whole environment on, Open MPI's only what it is told to.
    for name in $(compgen -e | grep -E '^(NOLOCO_|OMP_NUM_THREADS|PYTHONPATH)' || true) NOLOCO_REPLICA NOLOCO_HOST CUDA_VISIBLE_DEVICES; do
      exported+=(-x "$name")
    done
    [ "$(id -u)" != 0 ] || exported+=(--allow-run-as-root)
    where+=(--oversubscribe)
  fi
  start env "${environment[@]}" "$mpiexec" -n "$ranks" "${where[@]}" "${exported[@]}" "${options[@]}" \
    "$python" -m "$program" --config "$config" "$@"
done
finish
