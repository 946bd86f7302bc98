"""Write the chart's values.schema.json, values.yaml and README.md; with --check, fail if the committed files differ."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pd_shadow.chart.render import files  # noqa: E402

CHART = ROOT / "helm" / "pd-shadow"
TEMPLATE = ROOT / "pd_shadow" / "chart" / "README.md.in"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed files instead of writing")
    check = parser.parse_args().check
    stale = []
    for name, text in files(TEMPLATE.read_text(), (CHART / "renamed.yaml").read_text()).items():
        path = CHART / name
        if check and (not path.exists() or path.read_text() != text):
            stale.append(name)
        elif not check:
            path.write_text(text)
            print(path.relative_to(ROOT))
    for name in stale:
        print(f"helm/pd-shadow/{name} is not what the code makes; run `make chart`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
