"""A real single-node Slurm of the tests' own: its controller and its node daemon run from a folder and stop with it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIG = """\
ClusterName=darlit
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock,cred_expire=10
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.log
SlurmctldPort={port}
SlurmdPort={node_port}
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
InactiveLimit=0
KillWait=60
MinJobAge=600
SlurmctldTimeout=30
SlurmdTimeout=30
Waittime=0
SwitchType=switch/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} Sockets=1 CoresPerSocket={cores} ThreadsPerCore=1 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Install Slurm with apt where that is possible; return why it cannot run here, or ``None`` where it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "Slurm's daemons are started as root on Linux; this is not"
    commands = ("slurmctld", "slurmd", "sbatch", "munged")
    if all(shutil.which(command) for command in commands) and Path("/etc/munge/munge.key").exists():
        return None
    if shutil.which("apt-get") is None:
        return "Slurm is not installed and there is no apt-get to install it"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update"],
        ["apt-get", "install", "-y", "--no-install-recommends", "slurm-wlm", "munge"],
    ):
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        if result.returncode:
            return f"{' '.join(command)} failed: {(result.stderr.strip().splitlines() or ['no message'])[-1]}"
    return None


@contextmanager
def running(root: Path) -> Iterator[Path]:
    """Start munged, slurmctld and slurmd in ``root``, set SLURM_CONF, and stop all three at the end."""
    for folder in ("state", "spool", "log"):
        (root / folder).mkdir()
    key = root / "munge.key"
    shutil.copy("/etc/munge/munge.key", key)
    os.chown(key, 0, 0)
    key.chmod(0o400)
    root.chmod(0o755)
    config = root / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    config.write_text(
        CONFIG.format(
            root=root, host=host, port=_free_port(), node_port=_free_port(), cores=len(os.sched_getaffinity(0))
        )
    )
    os.environ["SLURM_CONF"] = str(config)
    try:
        subprocess.run(
            [
                "munged", "--force", f"--key-file={key}", f"--socket={root}/munge.sock",
                f"--pid-file={root}/munged.pid", f"--log-file={root}/munged.log", f"--seed-file={root}/munged.seed",
            ],
            check=True,
        )  # fmt: skip
        subprocess.run(["slurmctld", "-i"], check=True)
        subprocess.run(["slurmd"], check=True)
        _wait_for_node()
        yield root
    finally:
        _cancel_all()
        for name in ("slurmd", "slurmctld", "munged"):
            _stop(root / f"{name}.pid")
        del os.environ["SLURM_CONF"]


def slurm(*command: str) -> str:
    """Run one of Slurm's commands and return what it printed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _cancel_all() -> None:
    """Leave no process of a job behind, whatever state the tests left it in."""
    for _ in range(30):
        subprocess.run(["scancel", "--me", "--signal=KILL", "--full"], check=False, capture_output=True, timeout=60)
        subprocess.run(["scancel", "--me"], check=False, capture_output=True, timeout=60)
        queue = subprocess.run(["squeue", "--me", "--noheader"], check=False, capture_output=True, timeout=60)
        if not queue.stdout.strip():
            return
        time.sleep(1)


def _wait_for_node() -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        answer = subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, check=False)
        if answer.stdout.strip() == "idle":
            return
        time.sleep(0.5)
    raise RuntimeError(f"the node did not come up: {answer.stdout} {answer.stderr}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _stop(pid_file: Path) -> None:
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
    except (FileNotFoundError, ValueError, ProcessLookupError):
        return
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
