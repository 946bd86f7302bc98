"""Carry out the steps of docker/control-plane.Dockerfile without a container engine, and start what it starts.

COPY, WORKDIR and RUN happen in a scratch folder: absolute paths of the image become paths below it. What needs root or
a base image (users, FROM, USER) is listed as not tried. Needs a package index and about a minute; exit code 1 where a
step or an entry point fails.
"""

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "docker" / "control-plane.Dockerfile"
OUR_PATHS = re.compile(r"(?<![\w.}])/(?=opt/|usr/share/pd-shadow|src\b)")
# Engines' packages, which this image must not have.
UNWANTED = {"torch", "vllm", "nixl", "pip", "pytest"}

ENTRY_POINTS = {
    "pd-shadow --help": 0,
    "pd-shadow serve controller --help": 0,
    "pd-shadow serve gateway --help": 0,
    "pd-shadow serve engine --emulated --help": 0,
    "pd-shadow admin --help": 0,
    "pd-shadow config check controller": 0,
    "pd-shadow config check gateway": 0,
    "pd-shadow config check controller no-such-file.yaml": 2,
    "pd-shadow health --help": 0,
    # Nothing listens there.
    "pd-shadow health 127.0.0.1:9 --timeout 1": 1,
}


class Step(NamedTuple):
    """One instruction of a Dockerfile."""

    instruction: str
    arguments: str


class Outcome(NamedTuple):
    """What became of a step or a command."""

    what: str
    passed: bool
    seconds: float
    output: str


def steps(text: str) -> Iterator[Step]:
    """The instructions, continued lines joined, comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, arguments = line.strip().partition(" ")
        yield Step(instruction.upper(), " ".join(arguments.split()))


def carried_out(step: Step, root: Path, workdir: Path, env: dict[str, str]) -> Outcome | None:
    """COPY of the context and RUN of what needs no root; None for anything else."""
    started = time.monotonic()
    what = f"{step.instruction} {step.arguments}"
    if step.instruction == "COPY" and not step.arguments.startswith("--from="):
        *sources, target = step.arguments.split()
        for source in sources:
            copy(ROOT / source, workdir / target if len(sources) == 1 else workdir / target / source)
        return Outcome(what, True, time.monotonic() - started, "")
    if step.instruction == "RUN" and "useradd" not in step.arguments:
        command = OUR_PATHS.sub(f"{root}/", step.arguments)
        return run(what, ["/bin/sh", "-c", command], 0, workdir, env)
    return None


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def run(what: str, command: list[str], expected: int, cwd: Path, env: dict[str, str]) -> Outcome:
    started = time.monotonic()
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Outcome(what, False, time.monotonic() - started, str(error))
    passed = done.returncode == expected
    output = "" if passed else f"exit code {done.returncode}, expected {expected}\n{done.stdout}{done.stderr}"
    return Outcome(what, passed, time.monotonic() - started, output)


def try_image(root: Path) -> Iterator[Outcome | Step]:
    """Outcomes in order; a Step is one that was not tried."""
    # As in a container: nothing of this checkout or of its environment is on the path.
    python = Path(sys.executable).resolve().parent
    outside = {
        key: value for key, value in os.environ.items() if key.startswith(("PIP_", "http", "HTTP", "SSL_", "no_"))
    }
    env = {**outside, "PATH": f"{python}:/usr/bin:/bin", "HOME": str(root), "LANG": "C.UTF-8"}
    workdir = root
    for step in steps(DOCKERFILE.read_text()):
        if step.instruction == "WORKDIR":
            workdir = root / step.arguments.lstrip("/")
            workdir.mkdir(parents=True, exist_ok=True)
            continue
        outcome = carried_out(step, root, workdir, env)
        if outcome is None:
            yield step
            continue
        yield outcome
        if not outcome.passed:
            return
    packages = (root / "usr/share/pd-shadow/packages.txt").read_text().split()
    found = sorted(UNWANTED & {package.partition("==")[0] for package in packages})
    yield Outcome(f"{len(packages)} packages, without {', '.join(sorted(UNWANTED))}", not found, 0.0, ", ".join(found))
    for command, expected in ENTRY_POINTS.items():
        program, *arguments = shlex.split(command)
        empty = root / "empty"
        empty.mkdir(exist_ok=True)
        yield run(command, [str(root / "opt/pd-shadow/bin" / program), *arguments], expected, empty, env)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(f"{DOCKERFILE.relative_to(ROOT)}, with Python {platform.python_version()}")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="pd-shadow-image-") as folder:
        for outcome in try_image(Path(folder)):
            if isinstance(outcome, Step):
                print(f"  not tried  {outcome.instruction} {outcome.arguments[:90]}")
                continue
            failed += not outcome.passed
            print(f"  {'ok' if outcome.passed else 'FAILED':<9}  {outcome.seconds:5.1f} s  {outcome.what[:90]}")
            if outcome.output:
                print(outcome.output[-4000:])
    print("failed" if failed else "all tried steps and entry points are good")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
