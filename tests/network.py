"""Machines of a cluster: network namespaces on a bridge, between which packets can be lost."""

import contextlib
import shutil
import subprocess

_PREFIX = "10.77.0."


def can_make():
    """Returns whether this process may make networks: `unshare --user --map-root-user --net` starts it where it may."""
    if not (shutil.which("ip") and shutil.which("unshare")):
        return False
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    if len(links.splitlines()) != 1:  # not of its own
        return False
    with contextlib.suppress(subprocess.CalledProcessError), contextlib.closing(Network(1)):
        return True
    return False


class Network:
    """`count` machines, each with an address; this process is on the bridge between them, and reaches all."""

    def __init__(self, count):
        _ip("link add bridge type bridge", "link set bridge up", f"addr add {_PREFIX}1/24 dev bridge", "link set lo up")
        self.addresses = [f"{_PREFIX}{10 + machine}" for machine in range(count)]
        # Each ends with this process, whose end of its pipe is closed then.
        self._holders = [subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE) for _ in self.addresses]
        for machine, address in enumerate(self.addresses):
            inside = ["nsenter", "--net=" + self.namespace(machine), "ip"]
            while subprocess.run(["readlink", self.namespace(machine)], capture_output=True).stdout == _own():
                pass  # it has not been made yet
            _ip(f"link add machine{machine} type veth peer name eth0 netns {self._holders[machine].pid}")
            _ip(f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up", command=inside)
            self.join(machine)

    def namespace(self, machine):
        """Returns the path of a machine's network, for forked.NETWORK."""
        return f"/proc/{self._holders[machine].pid}/ns/net"

    def cut(self, machine):
        """Loses all packets from a machine and to it, from now on."""
        _ip(f"link set machine{machine} nomaster")

    def join(self, machine):
        _ip(f"link set machine{machine} master bridge up")

    def close(self):
        for holder in self._holders:
            holder.communicate()
        _ip("link del bridge")


def _own():
    return subprocess.run(["readlink", "/proc/self/ns/net"], capture_output=True).stdout


def _ip(*lines, command=("ip",)):
    for line in lines:
        subprocess.run([*command, *line.split()], check=True, capture_output=True)
