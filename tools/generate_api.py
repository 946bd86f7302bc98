"""Generate pd_shadow/api/v1 from protos/; with --check, fail if the committed files differ.

protoc writes modules that import each other by the proto package's path; the one rewrite below moves them into the
Python package that ships them.
"""

import argparse
import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
OUT = ROOT / "pd_shadow" / "api" / "v1"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(out: Path) -> list[Path]:
    """Run protoc into `out` and return the files it wrote, imports rewritten."""
    from grpc_tools import protoc

    well_known = Path(protoc.__file__).parent / "_proto"
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("pdshadow/v1/*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        bin_dir = Path(sys.executable).parent
        command = [
            sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", f"-I{well_known}",
            f"--plugin=protoc-gen-mypy={bin_dir / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={bin_dir / 'protoc-gen-mypy_grpc'}",
            f"--python_out={scratch}", f"--grpc_python_out={scratch}",
            f"--mypy_out=quiet:{scratch}", f"--mypy_grpc_out=quiet:{scratch}",
            *sources,
        ]  # fmt: skip
        subprocess.run(command, check=True)
        written = []
        for path in sorted(Path(scratch, "pdshadow", "v1").iterdir()):
            text = path.read_text()
            text = text.replace("from pdshadow.v1 import", "from pd_shadow.api.v1 import")
            text = text.replace("pdshadow.v1 import", "pd_shadow.api.v1 import")
            target = out / path.name
            target.write_text(text)
            written.append(target)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed files instead of writing")
    if not parser.parse_args().check:
        for path in generate(OUT):
            print(path.relative_to(ROOT))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
        committed = {path.name for path in OUT.iterdir() if path.name.endswith(SUFFIXES)}
        stale = sorted(committed ^ {path.name for path in fresh})
        stale += [p.name for p in fresh if p.name in committed and not filecmp.cmp(p, OUT / p.name, shallow=False)]
    for name in stale:
        print(f"pd_shadow/api/v1/{name} does not match protos/; run `make api`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
