r"""Start a command on N nodes of a Ray cluster, one process per node; on Kubernetes, of a RayCluster or RayJob.

    ray job submit --working-dir deploy -- python on_ray.py --nodes 2 --gpus 8 mjax train --config llama3_8b \
        --mesh.data 16 --data.path /shared/data/corpus --runs /shared/runs

mjax must be installed on the nodes, and /shared be visible to all. `ray job stop` ends the processes without saving;
the same command continues from the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys


def variables(address: str, nodes: int) -> list[dict[str, str]]:
    """Return the variables that mjax reads, for each process; `address` is HOST:PORT of process 0."""
    same = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(nodes)}
    return [{**same, "JAX_PROCESS_ID": str(index)} for index in range(nodes)]


def free_address() -> str:
    """HOST:PORT of this node that nothing listens at."""
    import ray

    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def run(command: list[str], environment: dict[str, str]) -> int:
    """Exit code of `command` on this node. Ray shows the node's output in the job's output."""
    return subprocess.run(command, env=os.environ | environment).returncode


def main() -> int:
    """The largest exit code of the processes."""
    parser = argparse.ArgumentParser(description="Start a command on N nodes of a Ray cluster, one process per node.")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus", type=float, default=0, help="of each node")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()

    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init()
    group = ray.util.placement_group([{"CPU": 1, "GPU": given.gpus}] * given.nodes, strategy="STRICT_SPREAD")
    print(f"waiting for {given.nodes} nodes with {given.gpus:g} GPUs each", flush=True)
    ray.get(group.ready())

    def on_node(index: int, function, *arguments) -> ray.ObjectRef:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        task = ray.remote(num_cpus=1, num_gpus=given.gpus, max_retries=0, scheduling_strategy=place)(function)
        return task.remote(*arguments)

    environments = variables(ray.get(on_node(0, free_address)), given.nodes)
    waiting = [on_node(index, run, given.command, one) for index, one in enumerate(environments)]
    return max(abs(code) for code in ray.get(waiting))  # negative: ended by a signal


if __name__ == "__main__":
    sys.exit(main())
