"""A batch script for Slurm: a Ray cluster for as long as one run, on the nodes of one job."""

from __future__ import annotations

from pathlib import Path

from raynforce.ops.cluster.options import PACKAGE, Options, python_version, ray_version, requirements

SCRIPT = """\
#!/bin/bash
# A Ray cluster on the nodes of one Slurm job, and a run on it: docs/cluster.md and docs/security.md explain it.
#   sbatch {script}                       the example below
#   sbatch {script} ppo my_sims:make      whatever `raynforce train` can train
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus}
{gpus}#SBATCH --time=24:00:00
#SBATCH --output={name}-%j.log
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
set -euo pipefail

# Ray {ray} on Python {python}, the same on all nodes.
{path}export RAY_USAGE_STATS_ENABLED=0
have=$(python -c 'import platform, ray; print(ray.__version__, ".".join(platform.python_version_tuple()[:2]))')
[ "$have" = "{ray} {python}" ] || {{ echo "this has Ray and Python $have, not {ray} {python}" >&2; exit 2; }}

# A token for this job alone, which other users of the nodes cannot read.
umask 077
folder=$HOME/.raynforce/slurm-$SLURM_JOB_ID
mkdir -p "$folder"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$folder/auth_token
python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$RAY_AUTH_TOKEN_PATH"

# Other jobs may share a node: ports by the job's number.
port=$((20000 + SLURM_JOB_ID % 20000))
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${{nodes[0]}}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname -I | cut -d' ' -f1)
export RAY_ADDRESS=$address:$port

parts=()
stop() {{
    trap - EXIT
    [ ${{#parts[@]}} = 0 ] || kill "${{parts[@]}}" 2>/dev/null || true
    wait
    rm -rf "$folder"
}}
trap stop EXIT

joined() {{  # so many nodes, within so many seconds
    local until=$((SECONDS + $2)) enough
    enough="import json, sys; sys.exit(len(json.loads(sys.stdin.read())['nodes']) < $1)"
    until python -m raynforce cluster status --json 2>/dev/null | python -c "$enough" 2>/dev/null; do
        [ $SECONDS -lt $until ] || return 1
        sleep 1
    done
}}

gpus=${{SLURM_GPUS_ON_NODE:-0}}
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \\
    ray start --head --block --node-ip-address="$address" --port="$port" --dashboard-host=127.0.0.1 \\
    --dashboard-port=$((port + 20000)) --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$gpus" \\
    --resources='{{"learner": 100}}' --temp-dir="/tmp/ray-$SLURM_JOB_ID" &
parts+=($!)
joined 1 60 || {{ echo "Ray did not start on $head" >&2; exit 1; }}
for node in "${{nodes[@]:1}}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" \\
        ray start --block --address="$RAY_ADDRESS" --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$gpus" &
    parts+=($!)
done

joined ${{#nodes[@]}} 120 || echo "not all nodes have joined: the run begins with those that have" >&2

# It goes on where the job was requeued or submitted again.
run={runs}/{name}
[ $# -gt 0 ] || set -- ppo CartPole-v1 --target 475
samplers=$((SLURM_CPUS_PER_TASK * ${{#nodes[@]}} - 1))
if python -m raynforce show "$run" >/dev/null 2>&1; then
    python -m raynforce resume "$run" &
else
    python -m raynforce train "$@" --runtime ray --address "$RAY_ADDRESS" --samplers $samplers --out "$run" &
fi
run_pid=$!
trap 'kill -TERM $run_pid; wait $run_pid; exit 143' TERM  # with time for a checkpoint before Slurm ends the job
code=0
wait $run_pid || code=$?
exit $code
"""


def files(options: Options, folder: Path) -> dict[str, str]:
    path = f'export PATH="{Path(options.python).parent}:$PATH"\n' if options.python else ""
    script = SCRIPT.format(
        script=f"{options.name}.sbatch",
        name=options.name,
        nodes=1 + options.max_workers,
        cpus=options.cpus or 8,
        gpus=f"#SBATCH --gpus-per-node={options.gpus}\n" if options.gpus else "",
        ray=ray_version(),
        python=python_version(),
        path=path + f'export PYTHONPATH="{PACKAGE.parent}${{PYTHONPATH:+:$PYTHONPATH}}"\n',
        runs=options.storage or "$HOME/runs",
    )
    return {f"{options.name}.sbatch": script, "requirements.txt": requirements(options)}
