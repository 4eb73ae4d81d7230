"""The files of deploy/: what launchers tell two processes with them."""

import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tyro
import yaml

from mjax.cluster.launch import Distributed
from mjax.commands.train import TrainArguments, choose_config
from mjax.doctor import GREEN, MachineInfo
from mjax.doctor.host import check_processes
from tests.conftest import ROOT
from tests.ports import free_port

DEPLOY = ROOT / "deploy"
GPUS = 8  # of a node
READ_BY_MJAX = re.compile("JAX_|JOB_COMPLETION_INDEX|SKYPILOT_|RAY_")


def _read(name):
    return yaml.safe_load((DEPLOY / name).read_text())


def _jobset(_):
    """Play JobSet, which annotates its pods, and Kubernetes, which makes their environments."""
    made = _read("jobset.yaml")
    name, [job] = made["metadata"]["name"], made["spec"]["replicatedJobs"]
    container = job["template"]["spec"]["template"]["spec"]["containers"][0]
    assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"]
    assert job["template"]["spec"]["completionMode"] == "Indexed"
    for index in range(job["template"]["spec"]["parallelism"]):
        annotations = {"jobset.sigs.k8s.io/jobset-name": name, "batch.kubernetes.io/job-completion-index": str(index)}
        environment: dict[str, str] = {}
        for variable in container["env"]:
            if "value" in variable:  # only variables above it are known
                value = variable["value"]
                for above in environment:
                    value = value.replace(f"$({above})", environment[above])
            else:
                path = variable["valueFrom"]["fieldRef"]["fieldPath"]
                value = annotations[re.fullmatch(r"metadata\.annotations\['(.*)'\]", path)[1]]
            environment[variable["name"]] = value
        yield environment | {"JOB_COMPLETION_INDEX": str(index)}  # added at the end


def _trainjob(_):
    """Play the runtime jax-distributed of Kubeflow Trainer."""
    made = _read("trainjob.yaml")
    name, nodes = made["metadata"]["name"], made["spec"]["trainer"]["numNodes"]
    assert made["spec"]["runtimeRef"]["name"] == "jax-distributed"
    for index in range(nodes):
        yield {
            "JAX_NUM_PROCESSES": str(nodes),
            "JAX_PROCESS_ID": str(index),
            "JAX_COORDINATOR_ADDRESS": f"{name}-node-0-0.{name}:29500",
            "JAX_COORDINATOR_PORT": "29500",
            "JOB_COMPLETION_INDEX": str(index),
        }


def _skypilot(_):
    nodes = _read("skypilot.yaml")["num_nodes"]
    hosts = "\n".join(f"10.0.0.{index + 1}" for index in range(nodes))
    for index in range(nodes):
        yield {
            "SKYPILOT_NODE_IPS": hosts,
            "SKYPILOT_NODE_RANK": str(index),
            "SKYPILOT_NUM_NODES": str(nodes),
            "SKYPILOT_NUM_GPUS_PER_NODE": str(GPUS),
        }


def _ray(_):
    for environment in runpy.run_path(str(DEPLOY / "on_ray.py"))["variables"]("10.0.0.1:4321", 2):
        yield environment | {"RAY_JOB_ID": "01000000"}


def _on_this_host(folder, hosts):
    """An environment in which ssh runs the command here."""
    (folder / "ssh").write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    (folder / "ssh").chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "HOSTS": hosts}


def _ssh(folder):
    write = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + os.environ['JAX_PROCESS_ID'], 'w'))"
    command = ["bash", DEPLOY / "ssh.sh", sys.executable, "-c", write, folder / "it's two"]
    subprocess.run(command, env=_on_this_host(folder, "me@node0 node1"), cwd=folder, check=True)
    for index in range(2):
        environment = json.loads((folder / f"it's two{index}").read_text())
        yield {name: value for name, value in environment.items() if READ_BY_MJAX.match(name)}


LAUNCHERS = {  # environments of the processes, the address of process 0, and the launcher's name
    "jobset.yaml": (_jobset, "llama3-8b-nodes-0-0.llama3-8b:29500", "Kubernetes"),
    "trainjob.yaml": (_trainjob, "llama3-8b-node-0-0.llama3-8b:29500", "Kubernetes"),
    "skypilot.yaml": (_skypilot, "10.0.0.1:29500", "SkyPilot"),
    "on_ray.py": (_ray, "10.0.0.1:4321", "Ray"),
    "ssh.sh": (_ssh, "node0:29500", "JAX_NUM_PROCESSES"),
}


def test_every_file_of_deploy_is_played():
    files = {file.name for file in DEPLOY.iterdir() if file.is_file() and not file.name.startswith("Dockerfile")}
    assert files == set(LAUNCHERS)


@pytest.mark.ci
@pytest.mark.parametrize("linter", ["hadolint", "actionlint"])
def test_linters_accept_image_and_workflows(linter):
    files = [DEPLOY / "Dockerfile"] if linter == "hadolint" else sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert files
    found = subprocess.run([Path(sys.executable).parent / linter, *files], capture_output=True, text=True)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_processes_are_told_where_they_meet(name, tmp_path):
    environments, address, launcher = LAUNCHERS[name]
    found = list(environments(tmp_path))
    assert [Distributed().with_launcher(one) for one in found] == [
        Distributed(address, 2, 0),
        Distributed(address, 2, 1),
    ]
    said = f"{launcher} started 2 processes: train.py joins them at {address}, this command checks one host"
    finding = check_processes(MachineInfo(environment=found[1]))
    assert (finding.status, finding.message) == (GREEN, said)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_command_fits_nodes_and_gpus(name):
    text = (DEPLOY / name).read_text()
    if name in ("jobset.yaml", "trainjob.yaml"):
        words = [word for line in re.findall(r"(?:command|args): (\[.*\])", text) for word in yaml.safe_load(line)]
    else:
        words = shlex.split(re.search(r"mjax train (?:.*\\\n)*.*", text)[0].replace("\\\n#", "").replace("\\\n", ""))
    assert words[:2] == ["mjax", "train"]
    chosen = choose_config(words[2:])
    settings = tyro.cli(TrainArguments, args=words[2:], default=chosen).settings
    assert settings.mesh.devices == 2 * GPUS
    assert text.count("nvidia.com/gpu: 8") + text.count("H100:8") + text.count("--gpus 8") == (name != "ssh.sh")


PROGRAM = """
import pathlib
from mjax.cluster import launch, processes
processes.start(launch.Distributed(start_timeout=60))  # below the test's limit: it says who is missing
import jax
pathlib.Path(f"met{jax.process_index()}").write_text(str(jax.process_count()))
"""


@pytest.mark.ci
def test_two_processes_meet(tmp_path):
    command = ["bash", DEPLOY / "ssh.sh", sys.executable, "-c", PROGRAM]
    # No collectives: gloo, which carries them between CPUs, hangs once in 100 runs of two processes that end at once.
    here = _on_this_host(tmp_path, "127.0.0.1 localhost") | {"PORT": str(free_port())}
    here |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    subprocess.run(command, env=here, cwd=tmp_path, check=True, timeout=120)
    assert [(tmp_path / f"met{index}").read_text() for index in range(2)] == ["2", "2"]


def test_interrupted_ssh_waits_for_save(tmp_path):
    """SIGTERM reaches process 0, whose exit code the script returns."""
    saving = 'trap "sleep 0.2; exit 75" TERM; touch started; for i in $(seq 2000); do sleep 0.05; done'
    command = ["bash", DEPLOY / "ssh.sh", "bash", "-c", saving]
    with subprocess.Popen(command, env=_on_this_host(tmp_path, "node0"), cwd=tmp_path) as script:
        try:
            while not (tmp_path / "started").exists():
                assert script.poll() is None
                time.sleep(0.02)
            script.send_signal(signal.SIGINT)
            assert script.wait(60) == 75
        finally:
            script.kill()
    assert {file.name for file in tmp_path.iterdir()} == {"ssh", "started"}
