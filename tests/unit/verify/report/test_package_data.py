"""A wheel holds the templates and the stylesheet of pages."""

from pathlib import Path

from setuptools.config.pyprojecttoml import read_configuration

from tests.support.paths import REPO

FOLDER = REPO / "titan_moe" / "verify" / "report"


def test_every_template_is_package_data():
    data = read_configuration(REPO / "pyproject.toml", expand=False)["tool"]["setuptools"]
    patterns = data["package-data"]["titan_moe.verify.report"]
    packed = {path for pattern in patterns for path in FOLDER.glob(pattern)}
    files = {path for path in FOLDER.rglob("*") if path.suffix in (".html", ".css")}
    assert len(files) >= 7 and files == packed
    assert Path("style.css") in {path.relative_to(FOLDER / "templates") for path in files}
