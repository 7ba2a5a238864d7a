"""The findings that `sys_scan_findings.py` makes: ten producers, their kinds of findings, and what connects them.

A kind is a table row. Its texts are formats over the values of its metadata:

    Kind("suid", "Setuid root program {path}", …, action="Remove the setuid bit from {path} …", make=…)

A story is a list of kinds that share values, such as a process id: that is what a correlation reports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

PRODUCERS = ("process", "network", "suid", "kernel", "modules", "ioc", "mac", "dns", "endpoint", "world-writable")
_USERS = ("www-data", "postgres", "jenkins", "deploy", "backup", "guest", "maria", "jürgen", "svc-web", "ana")
_NAMES = ("update", "sync", "agent", "helper", "cache", "worker", "probe", "relay", "cron", "loader", "kit", "daemon")
_WORDS = ("north", "amber", "cedar", "delta", "ember", "falcon", "granite", "harbor", "indigo", "juniper", "kestrel")
_FOLDERS = ("/opt/tools", "/usr/local/bin", "/srv/app/bin", "/var/lib/build", "/home/deploy/bin", "/srv/données")
_HIDDEN = ("/tmp/.x", "/dev/shm/.k", "/var/tmp/.cache", "/tmp/.ICE", "/run/user/.s")  # noqa: S108  (text of findings)
_ZONES = ("example", "invalid", "test")  # reserved names, which no one can own
_PARAMETERS = (
    ("net.ipv4.ip_forward", 1, 0),
    ("kernel.kptr_restrict", 0, 2),
    ("kernel.unprivileged_bpf_disabled", 0, 1),
    ("fs.protected_symlinks", 0, 1),
    ("kernel.dmesg_restrict", 0, 1),
    ("net.ipv4.conf.all.accept_redirects", 1, 0),
    ("kernel.yama.ptrace_scope", 0, 1),
    ("fs.suid_dumpable", 2, 0),
)


@dataclass(frozen=True)
class Kind:
    """One kind of finding. `risk` has impact, exposure, anomaly and confidence, each from 0 to 1."""

    producer: str
    title: str
    description: str
    rationale: str
    action: str
    risk: tuple[float, float, float, float]
    make: Callable[[Random], dict[str, Any]]  # its metadata, the most important values first


@dataclass(frozen=True)
class Story:
    """Findings that belong together: (producer, number of the kind) of each member, and the shared values."""

    type: str
    title: str
    rationale: str
    members: tuple[tuple[str, int], ...]
    shared: Callable[[Random], dict[str, Any]]


def _pid(dice: Random) -> int:
    return dice.randrange(300, 32_768)


def _user(dice: Random) -> str:
    return dice.choice(_USERS)


def _address(dice: Random) -> str:
    """From the ranges that are reserved for documentation."""
    return f"{dice.choice(('192.0.2', '198.51.100', '203.0.113'))}.{dice.randrange(1, 255)}"


def _program(dice: Random) -> str:
    return f"{dice.choice(_FOLDERS)}/{dice.choice(_WORDS)}-{dice.choice(_NAMES)}"


def _hidden(dice: Random) -> str:
    return f"{dice.choice(_HIDDEN)}{dice.choice(_NAMES)}"


def _domain(dice: Random) -> str:
    return f"{dice.choice(_WORDS)}{dice.randrange(10, 100)}.{dice.choice(_NAMES)}.{dice.choice(_ZONES)}"


def _digest(dice: Random) -> str:
    return f"{dice.getrandbits(128):032x}"


def _parameter(dice: Random) -> dict[str, Any]:
    name, value, expected = dice.choice(_PARAMETERS)
    return {"parameter": name, "value": value, "expected": expected, "since_boot": dice.random() < 0.5}


def _module(dice: Random) -> str:
    return f"{dice.choice(('nv', 'snd', 'xt', 'dm', 'usb'))}_{dice.choice(_WORDS)}"


KINDS: dict[str, tuple[Kind, ...]] = {
    "process": (
        Kind(
            "process",
            "Process {pid} runs from a deleted file",
            "Process {pid} of {user} executes {exe}, which is no longer on disk. It was started {hours} hours ago.",
            "A program that deletes its own file hides from later inspection; package updates do not leave {exe}.",
            "Copy /proc/{pid}/exe for analysis, then stop process {pid}.",
            (0.8, 0.6, 0.95, 0.75),
            lambda d: {"pid": _pid(d), "exe": _hidden(d), "user": _user(d), "hours": d.randrange(1, 400)},
        ),
        Kind(
            "process",
            "Process {pid} uses {cpu} % of all cores",
            "{exe} (process {pid}, user {user}) has used {cpu} % of all cores for {hours} hours.",
            "No job of {user} is scheduled at this time, and the load does not follow the traffic of the host.",
            "Lower the priority of process {pid}, and ask {user} what {exe} computes.",
            (0.45, 0.3, 0.7, 0.6),
            lambda d: {"pid": _pid(d), "exe": _program(d), "user": _user(d), "cpu": d.randrange(71, 100),
                       "hours": d.randrange(3, 90)},
        ),
        Kind(
            "process",
            "Process {pid} traces another process",
            "Process {pid} ({exe}) is attached to process {target} of {user} with ptrace.",
            "A tracer reads the memory of its target, including keys and passwords, and no one debugs on this host.",
            "Detach process {pid} from process {target}, and replace the credentials that {target} holds.",
            (0.85, 0.45, 0.8, 0.7),
            lambda d: {"pid": _pid(d), "target": _pid(d), "exe": _program(d), "user": _user(d)},
        ),
    ),
    "network": (
        Kind(
            "network",
            "Steady connections to {remote}",
            "Process {pid} connects to {remote}, port {port}, every {interval} seconds.",
            "The even interval of {interval} seconds is that of a beacon; people and their programs are less regular.",
            "Block {remote} at the firewall, and record the traffic of port {port}.",
            (0.75, 0.8, 0.9, 0.7),
            lambda d: {"remote": _address(d), "port": d.choice((443, 4444, 8443, 53, 9001)), "pid": _pid(d),
                       "interval": d.choice((30, 45, 60, 90, 300))},
        ),
        Kind(
            "network",
            "Port {port} listens on all addresses",
            "{service} answers on port {port} of every interface; {peers} hosts have connected this week.",
            "{service} is meant for local clients, and no rule of the firewall covers port {port}.",
            "Bind {service} to 127.0.0.1, or close port {port} at the firewall.",
            (0.55, 0.9, 0.3, 0.95),
            lambda d: {**d.choice(({"port": 6379, "service": "redis"}, {"port": 27017, "service": "mongod"},
                                   {"port": 23, "service": "telnetd"}, {"port": 2375, "service": "dockerd"},
                                   {"port": 5601, "service": "kibana"}, {"port": 11211, "service": "memcached"})),
                       "peers": d.randrange(0, 40)},
        ),
        Kind(
            "network",
            "{megabytes} MB went out to {remote}",
            "Process {pid} sent {megabytes} MB to {remote} in {minutes} minutes; the host's usual day has {usual} MB.",
            "The volume is far above the host's usual day, and {remote} is not among its known partners.",
            "Cut the connection to {remote}, and find out which files process {pid} has read.",
            (0.9, 0.75, 0.85, 0.65),
            lambda d: {"remote": _address(d), "megabytes": d.randrange(800, 40_000), "pid": _pid(d),
                       "minutes": d.randrange(4, 200), "usual": d.randrange(5, 90)},
        ),
        Kind(
            "network",
            "SSH connections to {hosts} hosts",
            "{user} opened SSH connections to {hosts} hosts in {minutes} minutes; {failed} of them failed.",
            "An administrator visits few hosts at a time; {hosts} in {minutes} minutes is a search for access.",
            "Lock the SSH keys of {user}, and check the {hosts} hosts for new sessions.",
            (0.7, 0.7, 0.85, 0.6),
            lambda d: {"user": _user(d), "hosts": d.randrange(12, 200), "minutes": d.randrange(2, 30),
                       "failed": d.randrange(3, 90)},
        ),
    ),
    "suid": (
        Kind(
            "suid",
            "New setuid root program {path}",
            "{path} has mode {mode} and belongs to root. No package contains it.",
            "Any local account can run {path} as root, and it appeared {days} days ago outside the package manager.",
            "Remove the setuid bit from {path}, and find out who installed it.",
            (0.85, 0.4, 0.9, 0.85),
            lambda d: {"path": _program(d), "mode": d.choice(("4755", "4711", "6755")), "days": d.randrange(1, 20)},
        ),
        Kind(
            "suid",
            "Setuid interpreter {path}",
            "{path} is an interpreter with mode {mode}; its users can run any code as {owner}.",
            "An interpreter with the setuid bit gives the rights of {owner} to everyone who can start it.",
            "Remove the setuid bit from {path}; use sudo with a fixed command instead.",
            (0.9, 0.5, 0.5, 0.95),
            lambda d: {"path": d.choice(("/usr/bin/python3", "/usr/bin/perl", "/usr/bin/node", "/opt/tools/lua")),
                       "mode": d.choice(("4755", "4750")), "owner": d.choice(("root", "backup"))},
        ),
        Kind(
            "suid",
            "Setgid program {path} of group {group}",
            "{path} runs with the group {group} and was changed {days} days ago.",
            "The group {group} can read more than the program needs, but its package explains the bit.",
            "Compare {path} with its package, and reinstall it if they differ.",
            (0.35, 0.3, 0.3, 0.7),
            lambda d: {"path": _program(d), "group": d.choice(("shadow", "tty", "mail", "disk")),
                       "days": d.randrange(1, 300)},
        ),
    ),
    "kernel": (
        Kind(
            "kernel",
            "{parameter} is {value} instead of {expected}",
            "The kernel parameter {parameter} has the value {value}; the policy of this host requires {expected}.",
            "{parameter} removes a protection that the other settings of the host rely on.",
            "Set {parameter} to {expected} and write it to /etc/sysctl.d.",
            (0.4, 0.35, 0.25, 0.95),
            _parameter,
        ),
        Kind(
            "kernel",
            "Kernel {release} has {fixes} missing security fixes",
            "The host runs the kernel {release}, {days} days old; {fixes} security fixes were published since.",
            "Known weaknesses of {release} have public exploits, so the age of the kernel counts more than its number.",
            "Install the current kernel and restart the host within {days} days of its release.",
            (0.6, 0.5, 0.2, 0.9),
            lambda d: {"release": f"{d.choice(('5.15', '6.1', '6.6', '6.8'))}.{d.randrange(3, 160)}",
                       "fixes": d.randrange(2, 60), "days": d.randrange(40, 500)},
        ),
    ),
    "modules": (
        Kind(
            "modules",
            "Module {module} is loaded but not on disk",
            "The kernel has loaded {module} ({size} bytes). There is no such file under /lib/modules.",
            "A module without a file was loaded from somewhere else; {module} can hide anything from this scan.",
            "Take the host off the network, and save its memory before {module} can be unloaded.",
            (0.95, 0.6, 0.9, 0.8),
            lambda d: {"module": _module(d), "size": d.randrange(8, 400) * 1024, "signed": False},
        ),
        Kind(
            "modules",
            "Module {module} is not signed",
            "{module} has no valid signature; it was loaded {hours} hours after the start of the host.",
            "The distribution signs its modules, so {module} was built elsewhere, most often for a driver.",
            "Find the package of {module}; sign it, or remove it with modprobe -r {module}.",
            (0.5, 0.4, 0.45, 0.8),
            lambda d: {"module": _module(d), "hours": d.randrange(0, 900), "signed": False},
        ),
    ),
    "ioc": (
        Kind(
            "ioc",
            "{path} is known malware",
            "The digest {digest} of {path} is on the list {feed}, as the family {family}.",
            "The list {feed} has few false alarms, and a digest cannot match by accident.",
            "Isolate the host, keep a copy of {path}, and start the response plan for {family}.",
            (0.95, 0.7, 0.9, 0.95),
            lambda d: {"path": _hidden(d), "family": d.choice(_WORDS), "feed": d.choice(("open-feed", "cert-list")),
                       "digest": _digest(d)},
        ),
        Kind(
            "ioc",
            "{remote} is on a block list",
            "{remote} is listed in {feed} since {days} days; the host has contacted it {count} times.",
            "Addresses change owners, so the entry of {feed} is a hint; {count} contacts are more than a visit.",
            "Block {remote}, and search the logs of other hosts for it.",
            (0.65, 0.7, 0.7, 0.5),
            lambda d: {"remote": _address(d), "feed": d.choice(("open-feed", "cert-list")),
                       "count": d.randrange(2, 400), "days": d.randrange(1, 120)},
        ),
    ),
    "mac": (
        Kind(
            "mac",
            "{system} only warns",
            "{system} has been in {mode} mode for {hours} hours: it logs {denials} violations and stops none.",
            "The mode was changed while the host was running, which an update never does.",
            "Set {system} to enforcing, and read its {denials} log entries of the last {hours} hours.",
            (0.65, 0.5, 0.7, 0.95),
            lambda d: {**d.choice(({"system": "SELinux", "mode": "permissive"}, {"system": "AppArmor",
                                                                                "mode": "complain"})),
                       "hours": d.randrange(1, 200), "denials": d.randrange(0, 900)},
        ),
        Kind(
            "mac",
            "{service} runs without a profile",
            "{service} (process {pid}) is not confined, although {system} has a profile for it.",
            "An unconfined {service} can read every file of its user, so one flaw in it opens the host.",
            "Load the profile of {service} and restart it.",
            (0.5, 0.55, 0.3, 0.9),
            lambda d: {"service": d.choice(("nginx", "sshd", "mysqld", "cupsd", "dovecot")), "pid": _pid(d),
                       "system": d.choice(("SELinux", "AppArmor"))},
        ),
    ),
    "dns": (
        Kind(
            "dns",
            "{count} lookups of long names below {domain}",
            "Process {pid} looked up {count} names below {domain}, with labels of {letters} letters on average.",
            "Names of {letters} random letters carry data: this is what a tunnel through DNS looks like.",
            "Refuse {domain} at the resolver, and decode the names that were looked up.",
            (0.85, 0.7, 0.9, 0.75),
            lambda d: {"domain": _domain(d), "count": d.randrange(200, 20_000), "pid": _pid(d),
                       "letters": d.randrange(38, 62)},
        ),
        Kind(
            "dns",
            "Lookups of the new domain {domain}",
            "The host looked up {domain} {count} times. The domain was registered {days} days ago.",
            "Young domains are common in attacks and rare in the work of this host.",
            "Ask the users of the host about {domain}, and block it until they have answered.",
            (0.4, 0.5, 0.6, 0.5),
            lambda d: {"domain": _domain(d), "count": d.randrange(1, 90), "days": d.randrange(1, 14)},
        ),
        Kind(
            "dns",
            "The resolver is {remote}",
            "/etc/resolv.conf names {remote}, which is not a resolver of this network; changed by {user}.",
            "The owner of {remote} sees every name and can send this host anywhere.",
            "Restore /etc/resolv.conf, and find out how {user} could change it.",
            (0.7, 0.75, 0.8, 0.85),
            lambda d: {"remote": _address(d), "user": _user(d)},
        ),
    ),
    "endpoint": (
        Kind(
            "endpoint",
            "The agent {agent} was stopped",
            "{user} stopped {agent} {hours} hours ago; the host has sent no events since.",
            "No one planned this, and what happened in these {hours} hours is not recorded.",
            "Start {agent} again, and ask {user} why it was stopped.",
            (0.7, 0.5, 0.85, 0.9),
            lambda d: {"agent": d.choice(("auditd", "osqueryd", "falco", "wazuh-agent")), "user": _user(d),
                       "hours": d.randrange(1, 72)},
        ),
        Kind(
            "endpoint",
            "{exe} wrote a new cron job",
            "{exe} of {user} wrote {path}, which runs every {minutes} minutes as root.",
            "A job that a program writes for itself survives a restart; packages install theirs in another way.",
            "Delete {path}, and keep {exe} for analysis.",
            (0.8, 0.5, 0.85, 0.8),
            lambda d: {"path": f"/etc/cron.d/{d.choice(_WORDS)}", "exe": _program(d), "user": _user(d),
                       "minutes": d.choice((1, 5, 10, 30))},
        ),
        Kind(
            "endpoint",
            "{user} signed in from {remote}",
            "{user} signed in from {remote}, {distance} km from the last place, {minutes} minutes later.",
            "No one travels {distance} km in {minutes} minutes, so two people use the account of {user}.",
            "End the sessions of {user}, and reset the password and the second factor.",
            (0.7, 0.8, 0.9, 0.6),
            lambda d: {"user": _user(d), "remote": _address(d), "distance": d.randrange(600, 9_000),
                       "minutes": d.randrange(5, 90)},
        ),
    ),
    "world-writable": (
        Kind(
            "world-writable",
            "{path} can be changed by everyone",
            "{path} has mode {mode}; it is read by {service}, which runs as root.",
            "Every local account can change what {service} does at its next start.",
            "Set the mode of {path} to 0644, and compare its content with the package.",
            (0.7, 0.5, 0.4, 0.95),
            lambda d: {"path": f"/etc/{d.choice(('systemd/system', 'init.d', 'default'))}/{d.choice(_WORDS)}.conf",
                       "mode": d.choice(("0666", "0777")),
                       "service": d.choice(("systemd", "nginx", "cron", "rsyslog"))},
        ),
        Kind(
            "world-writable",
            "The folder {folder} is in root's PATH and open to everyone",
            "{folder} has mode {mode} and comes before /usr/bin in root's PATH; {count} programs are in it.",
            "An attacker puts a program called ls into {folder} and waits until root types it.",
            "Set the mode of {folder} to 0755, and check its {count} programs.",
            (0.75, 0.55, 0.5, 0.9),
            lambda d: {"folder": d.choice(_FOLDERS), "mode": d.choice(("0777", "1777")), "count": d.randrange(1, 60)},
        ),
        Kind(
            "world-writable",
            "{count} files of {user} can be changed by everyone",
            "{count} files below {folder} have mode {mode}; the last one was written {hours} hours ago.",
            "The files are data and not programs, so the damage stays within the work of {user}.",
            "Remove the write permission of others from {folder}.",
            (0.25, 0.4, 0.15, 0.85),
            lambda d: {"user": _user(d), "folder": d.choice(_FOLDERS), "count": d.randrange(3, 900),
                       "mode": d.choice(("0666", "0777")), "hours": d.randrange(1, 900)},
        ),
    ),
}  # fmt: skip

STORIES = (
    Story(
        "same_process",
        "A hidden program calls home",
        "Process {pid} has no file and talks to {remote}: together they show a foothold in use.",
        (("process", 0), ("network", 0), ("ioc", 1)),
        lambda d: {"pid": _pid(d), "remote": _address(d)},
    ),
    Story(
        "privilege_path",
        "A way from any account to root",
        "Everyone can write to {folder}, and root's programs are started from there.",
        (("world-writable", 1), ("suid", 0)),
        lambda d: {"folder": (folder := d.choice(_FOLDERS)), "path": f"{folder}/{d.choice(_WORDS)}"},
    ),
    Story(
        "kernel_tampering",
        "The kernel of this host cannot be trusted",
        "{module} came from outside the distribution, and {parameter} makes it easier to hide it.",
        (("modules", 0), ("kernel", 0), ("mac", 0)),
        lambda d: {"module": _module(d), "parameter": "kernel.kptr_restrict", "value": 0, "expected": 2},
    ),
    Story(
        "data_theft",
        "Data leaves the host through DNS and the network",
        "Process {pid} sends data in two ways at once: through names below {domain} and to {remote}.",
        (("dns", 0), ("network", 2)),
        lambda d: {"pid": _pid(d), "domain": _domain(d), "remote": _address(d)},
    ),
    Story(
        "resource_abuse",
        "Someone else uses the processors of this host",
        "Process {pid} of {user} computes for a service behind {remote}, which is on a block list.",
        (("process", 1), ("ioc", 1)),
        lambda d: {"pid": _pid(d), "user": _user(d), "remote": _address(d)},
    ),
    Story(
        "defence_evasion",
        "The protection of the host was switched off first",
        "{user} stopped the recording of events before the mode of the access control changed.",
        (("endpoint", 0), ("mac", 0)),
        lambda d: {"user": _user(d), "hours": d.randrange(1, 48)},
    ),
    Story(
        "persistence",
        "A program made sure that it survives a restart",
        "{exe} of {user} wrote {path}, which runs as root and which everyone can change.",
        (("endpoint", 1), ("world-writable", 0)),
        lambda d: {"exe": _program(d), "user": _user(d), "path": f"/etc/cron.d/{d.choice(_WORDS)}", "service": "cron"},
    ),
    Story(
        "lateral_movement",
        "A stolen account searches the network",
        "{user} signed in from an impossible place and then tried many hosts.",
        (("endpoint", 2), ("network", 3)),
        lambda d: {"user": _user(d)},
    ),
)
