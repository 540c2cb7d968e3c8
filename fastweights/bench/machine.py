"""Where a result comes from: machine, versions, commit. Imports no framework until asked about the GPU."""

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import fastweights

PACKAGES = ("torch", "jax", "flax", "keras", "tensorflow", "triton", "transformers", "numpy")


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """The installed version of each package, None when absent, without importing it."""
    return {"fastweights": fastweights.__version__, "python": platform.python_version()} | {
        package: _version(package) for package in packages
    }


def _version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu() -> str:
    """The model name of the processor."""
    if sys.platform == "linux":
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return platform.processor() or platform.machine() or "unknown"


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def gpus() -> list[str]:
    """The GPUs PyTorch can use: name and memory."""
    import torch

    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in properties]


def name(device: str) -> str:
    """What to call this machine in a file name."""
    if device == "cuda":
        import torch

        return slug(torch.cuda.get_device_name())
    return slug(cpu())


def slug(text: str) -> str:
    """Lower-case letters and digits, all else a hyphen: for a file name.

    Examples:
        >>> slug("NVIDIA H100 80GB HBM3")
        'nvidia-h100-80gb-hbm3'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def commit() -> str:
    """The commit of this library's sources, "-dirty" when they were changed since; "nogit" outside a repository."""
    package = Path(fastweights.__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:  # installed into somebody else's repository
        return "nogit"
    return git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=7") or "nogit"


def describe(device: str) -> dict[str, object]:
    """The machine, for a result file: system, processor, cores and threads, and on a GPU its name and CUDA's
    version.
    """
    import torch

    return {
        "system": platform.platform(),
        "cpu": cpu(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "gpu": gpus() if device == "cuda" else [],
        "cuda": torch.version.cuda if device == "cuda" else None,
    }
