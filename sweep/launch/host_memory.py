"""Did the kernel kill for want of memory? Counters that only rise: read before a cell and after it.

`oom_kill` of /proc/vmstat counts the host; that of the control group counts what shares this process's limit, such as a
container (memory.events in version 2, memory.oom_control in version 1; see the kernel's cgroup documentation).
"""

from contextlib import suppress
from pathlib import Path


def oom_kills(root: Path = Path("/")) -> int:
    """The sum of all counters that can be read here. Only its rise means something."""
    return sum(_counter(path) for path in _files(root))


def _files(root: Path) -> list[Path]:
    files = [root / "proc/vmstat"]
    mount = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                files += [mount / group.lstrip("/") / "memory.events", mount / "memory.events"]
            elif "memory" in controllers.split(","):
                folder = mount / "memory"
                files += [folder / group.lstrip("/") / "memory.oom_control", folder / "memory.oom_control"]
    return list(dict.fromkeys(files))


def _counter(path: Path) -> int:
    with suppress(OSError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0
