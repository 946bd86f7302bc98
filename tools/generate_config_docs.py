"""Generate docs/configuration.md from the configuration models; with --check, fail if the committed file differs."""

import argparse
import sys
from pathlib import Path

from pd_shadow.cli.admin.contexts import FILE_VARIABLE, Contexts
from pd_shadow.cli.config import PROCESSES
from pd_shadow.common.config_reference import table

FILE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

Made from the models by `tools/generate_config_docs.py`; edit them instead.

Settings come from a YAML file (`--config`), then from the environment, then from the command line; the later ones win.
A variable is named after the process and the path of the key, with two underscores between them:
`PD_SHADOW_CONTROLLER__SHADOW__TOP_K=2`, `PD_SHADOW_GATEWAY__CAPS__SESSIONS=100`. Lists and mappings are YAML
(`PD_SHADOW_CONTROLLER__DISCOVERY__STATIC='[{name: p0, …}]'`); `null` unsets.

Unknown keys, at any depth and in the environment, are errors with the path and the nearest valid key; the exit code is
2. `pd-shadow config check controller cluster.yaml` tells beforehand, `config show` prints what a process would have,
`config schema` prints JSON schema.
"""

CONTEXTS = f"""
## Contexts of `pd-shadow admin`

Kept by `pd-shadow admin context set`, in the file that `${FILE_VARIABLE}` names or else in
`~/.config/pd-shadow/contexts.yaml`, mode 0600. Secrets never enter it.

"""


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, process in PROCESSES.items():
        parts.append(f"\n## `pd-shadow serve {name}`\n\n{table(process.model)}")
    return "".join([*parts, CONTEXTS, table(Contexts)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if docs/configuration.md differs")
    if not parser.parse_args().check:
        FILE.write_text(reference())
    elif FILE.read_text() != reference():
        sys.exit(f"{FILE.name} differs from the models; run tools/generate_config_docs.py")


if __name__ == "__main__":
    main()
