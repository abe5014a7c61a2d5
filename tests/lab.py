"""Two machines on one, for tests: network namespaces joined by a cable of their own, with sshd and Slurm. Needs root.

The namespaces' names are this process's own, and all else is inside them, or in a folder of the test's: any number of
labs can stand side by side. What they share is the disk, as the machines of a cluster do.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import uuid
from pathlib import Path

from conftest import wait_until

HOSTS = {"hosta": "10.77.0.1", "hostb": "10.77.0.2"}
NEEDED = {
    "ip": "iproute2",
    "/usr/sbin/sshd": "openssh-server",
    "ssh": "openssh-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
}
SBIN = os.environ["PATH"] + ":/usr/sbin:/sbin"
PATHS = os.environ | {"PATH": SBIN}


def missing():
    """Returns why there can be no lab on this machine, or None."""
    if os.geteuid() != 0:
        return "two hosts are made of network namespaces, for which one must be root"
    packages = [package for program, package in NEEDED.items() if not shutil.which(program, path=SBIN)]
    if packages:
        return f"needs the packages {' '.join(packages)}"
    probe = f"probe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, env=PATHS).returncode:
        return "this machine does not let root make network namespaces"
    run("ip", "netns", "del", probe)
    return None


def run(*command):
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, env=PATHS)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


class Lab:
    """A context manager: the two hosts stand within it."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.services = []
        self.namespaces = {host: f"{host}-{uuid.uuid4().hex[:8]}" for host in HOSTS}
        # `ip netns exec` mounts each of these folders' files and folders over /etc's.
        self.etc = {host: Path("/etc/netns", name) for host, name in self.namespaces.items()}

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.callback(self.clear)
            for host, name in self.namespaces.items():
                os.makedirs(self.etc[host])
                lines = ["127.0.0.1 localhost", *(f"{address} {other}" for other, address in HOSTS.items())]
                (self.etc[host] / "hosts").write_text("\n".join(lines) + "\n")
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            first, second = self.namespaces.values()
            run("ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
            for host, address in HOSTS.items():
                run("ip", "-n", self.namespaces[host], "addr", "add", f"{address}/24", "dev", "eth0")
            self.cable("up")
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self.stack.close()

    def clear(self):
        for name in self.namespaces.values():
            command = ["ip", "netns", "pids", name]
            while pids := subprocess.run(command, capture_output=True, text=True, env=PATHS).stdout.split():
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
        for service in self.services:
            service.wait()
        for host, name in self.namespaces.items():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, env=PATHS)
            shutil.rmtree(self.etc[host], ignore_errors=True)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()  # unless there is another lab

    def cable(self, state):
        """Cuts it ("down") or mends it ("up")."""
        for name in self.namespaces.values():
            run("ip", "-n", name, "link", "set", "eth0", state)

    def bytes_received(self, host):
        with_numbers = run("ip", "-n", self.namespaces[host], "-s", "link", "show", "eth0")
        return int(re.search(r"RX:.*\n\s*(\d+)", with_numbers)[1])

    def on(self, host, *command):
        """Returns the command that runs a command on a host, under that host's name."""
        name_it = ["unshare", "--uts", "bash", "-c", 'hostname "$0"; exec "$@"', host]
        return [shutil.which("ip", path=SBIN), "netns", "exec", self.namespaces[host], *name_it, *command]

    def serve(self, host, *command, **env):
        """Starts a service, which the lab ends with itself."""
        command = [str(part) for part in self.on(host, *command)]
        env = PATHS | env
        with open(self.folder / "services.log", "a") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            self.services.append(subprocess.Popen(command, env=env, **options))

    def start_sshd(self):
        """Root can log in from any host to any, by a key of this lab's."""
        Path("/run/sshd").mkdir(exist_ok=True)
        keys = self.folder / "ssh"
        keys.mkdir()
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / "key")
        server = f"HostKey {keys}/key\nAuthorizedKeysFile {keys}/key.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
        (keys / "sshd_config").write_text(server + "PermitRootLogin prohibit-password\n")
        for host in HOSTS:
            (self.etc[host] / "ssh").mkdir()
            client = f"Host *\n IdentityFile {keys}/key\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n"
            (self.etc[host] / "ssh" / "ssh_config").write_text(client + " LogLevel ERROR\n")
            self.serve(host, "/usr/sbin/sshd", "-D", "-e", "-f", keys / "sshd_config")
        wait_until(lambda: all(self.answers("hosta", "ssh", host, "true") for host in HOSTS))

    def start_slurm(self):
        """Returns the environment of its commands, which work on hosta."""
        slurm, host = self.folder / "slurm", "hosta"
        for name in ("munge", "state", "run", "spool"):
            (slurm / name).mkdir(parents=True, mode=0o700)
        (slurm / "munge" / "key").write_bytes(os.urandom(1024))
        (slurm / "munge" / "key").chmod(0o400)
        socket = slurm / "run" / "munge.sock"
        nodes = "\n".join(f"NodeName={name} NodeAddr={address} CPUs=2 State=UNKNOWN" for name, address in HOSTS.items())
        (slurm / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (slurm / "slurm.conf").write_text(
            f"""ClusterName=lab
SlurmctldHost={host}({HOSTS[host]})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={socket}
StateSaveLocation={slurm}/state
SlurmdSpoolDir={slurm}/spool/%n
SlurmctldPidFile={slurm}/run/slurmctld.pid
SlurmdPidFile={slurm}/run/slurmd-%n.pid
SlurmctldLogFile={slurm}/slurmctld.log
SlurmdLogFile={slurm}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
SchedulerParameters=sched_min_interval=0,sched_interval=2
KillWait=5
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
        )
        munge = ["--key-file", slurm / "munge" / "key", "--socket", socket, "--seed-file", slurm / "munge" / "seed"]
        munge += ["--pid-file", slurm / "run" / "munged.pid", "--log-file", slurm / "munge" / "log"]
        self.serve(host, "munged", "--foreground", "--force", *munge)
        wait_until(socket.exists)
        env = {"SLURM_CONF": str(slurm / "slurm.conf")}
        self.serve(host, "slurmctld", "-D", **env)
        for name in HOSTS:
            self.serve(name, "slurmd", "-D", "-N", name, **env)
        wait_until(lambda: self.answers(host, "sinfo", "-h", "-t", "idle", "-o", "%D", **env) == "2")
        return env

    def answers(self, host, *command, **env):
        """Returns what a command prints that succeeds, and False for one that fails."""
        env = PATHS | env
        done = subprocess.run(self.on(host, *command), env=env, capture_output=True, text=True, timeout=60)
        return done.returncode == 0 and (done.stdout.strip() or True)
