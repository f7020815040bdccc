"""The wheel works where nothing of this repository is."""

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", out, ROOT], check=True)
    return next(out.glob("*.whl"))


def test_wheel_holds_the_package_and_what_it_bundles(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert all(name == "mpic_rag" or name.endswith(".dist-info") for name in top)
    for part in (
        "kernels/rerotate/reference.py",
        "retrievers/shelf.py",
        "data/model/model.safetensors",
        "data/model/chat_template.jinja",
        "data/guide/questions.json",
        "py.typed",
    ):
        assert f"mpic_rag/{part}" in names
    assert any(name.endswith(".png") for name in names)


def test_wheel_runs_the_demo_from_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    subprocess.run([tmp_path / "env/bin/pip", "install", "--quiet", wheel], check=True)
    done = subprocess.run(
        [tmp_path / "env/bin/mpic-rag", "demo", "--store", tmp_path / "store", "--json"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    rows = json.loads(done.stdout)["rows"]
    assert len({row["question"] for row in rows}) >= 24
    assert all(row["recomputed"] == 0 for row in rows if row["method"] == "none")
