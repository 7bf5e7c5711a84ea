#!/bin/bash
# Trains on several nodes. Before its time is up, the job saves, requeues itself and later continues from there:
#
#     sbatch docs/slurm.sh imagenet100-class5 moco pnr --data /data/in100 --out runs/pnr
#
# docs/resuming.md explains the lines. The run folder must be on a file system that all nodes can access.
#SBATCH --job-name=fastcssl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

gpus_per_node=${SLURM_GPUS_ON_NODE:-8}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))

# srun forwards SIGUSR1 to torchrun on every node, but responds to SIGTERM by killing immediately.
is_time_up=
trap 'is_time_up=yes; kill -USR1 "$training"' USR1

# torchrun forwards only the signals listed here, and kills its ranks after the timeout.
# A node whose ranks end before rank 0 has saved must not end the other nodes.
srun --kill-on-bad-exit=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$gpus_per_node" \
  --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id="$SLURM_JOB_ID" \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout=240 \
  -m fastcssl.cli.train "$@" &
training=$!

# A trapped signal ends `wait` early, so wait again until the training has ended and its status is known.
wait "$training"
status=$?
while kill -0 "$training" 2>/dev/null; do
  wait "$training"
  status=$?
done

# torchrun ends with 1 both when it was stopped and when it failed, so only the signal decides.
# A run that finished is not requeued.
if [ -n "$is_time_up" ] && [ "$status" -ne 0 ]; then
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
