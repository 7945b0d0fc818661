"""Manifests of clusters and workflows of CI keep to their schemas, the Dockerfile passes its
linter, and all name files that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import validators
from pydantic import ValidationError
from ruamel.yaml import YAML

from tests.support.paths import REPO
from tests.support.processes import git

_HADOLINT = Path(sys.executable).parent / "hadolint"
_KINDS = {
    "PersistentVolumeClaim": "IoK8sApiCoreV1PersistentVolumeClaim",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}


def _keys(**types: object) -> dict[str, object]:
    """The JSON schema of an object that has no other keys."""
    return {"type": "object", "properties": types, "additionalProperties": False}


_TEXT, _TEXTS = {"type": "string"}, {"additionalProperties": {"type": "string"}}
_RESOURCES = _keys(infra=_TEXT, accelerators=_TEXT, network_tier=_TEXT, job_recovery={})
_TASK = _keys(
    **dict.fromkeys(("name", "workdir", "setup", "run"), _TEXT),
    **{"num_nodes": {"type": "integer"}, "resources": _RESOURCES, "config": {}},
    **{"volumes": _TEXTS, "envs": _TEXTS},
)
"""The keys of SkyPilot that the manifest uses; the package with its own schema is too heavy."""

_MISTAKES = {
    "configs/clusters/kubernetes.yaml": [
        ("numNodes: 8", "numNode: 8"),
        ("numNodes: 8", 'numNodes: "8"'),
        ("emptyDir:", "emptyDirectory:"),
        ("terminationGracePeriodSeconds: 600", "terminationGracePeriodSeconds: 10m"),
        ("    kind: TrainingRuntime\n    name: titan-moe", "    kind: TrainingRuntime"),
    ],
    "configs/clusters/skypilot.yaml": [
        ("num_nodes: 8", "num_node: 8"),
        ("num_nodes: 8", 'num_nodes: "8"'),
        ("accelerators:", "accelerator:"),
    ],
    ".github/workflows/regression.yml": [
        ("timeout-minutes", "timeout-minuts"),
        ("contents: write", "contents: wirte"),
        ("- cron", "- corn"),
    ],
    ".github/workflows/test.yml": [("fail-fast: false", "fail-fast: [1]")],
}
"""Right and wrong text of each file."""


def _keeps_to_schema(name: str, text: str) -> bool:
    documents = list(YAML(typ="safe", pure=True).load_all(text))
    if "kubernetes" not in name:
        schema = _TASK if "sky" in name else get_builtin_schema("vendor.github-workflows")
        return validators.validator_for(schema)(schema).is_valid(documents[0])
    from kubeflow_trainer_api import models  # A second to import.

    try:  # The models leave out what they do not know, and refuse other types.
        kinds = [(getattr(models, _KINDS[each["kind"]]), each) for each in documents]
        return all(kind.from_dict(each).to_dict() == each for kind, each in kinds)
    except ValidationError:
        return False


@pytest.mark.parametrize("name", _MISTAKES)
def test_manifest_keeps_to_its_schema_and_a_mistake_does_not(name: str) -> None:
    text = (REPO / name).read_text()
    assert _keeps_to_schema(name, text)
    for right, wrong in _MISTAKES[name]:
        assert right in text and not _keeps_to_schema(name, text.replace(right, wrong)), wrong
    named = re.findall(r"(?:configs|scripts|docs)/[\w./-]+|\./\w+\.sh", text)
    assert named and [path for path in named if not (REPO / path).exists()] == []


@pytest.mark.parametrize("tag", ["HEAD~1", None])
def test_suite_at_night_compares_with_the_last_green_commit(
    tmp_path: Path, tag: str | None
) -> None:
    workflow = YAML(typ="safe").load(REPO / ".github" / "workflows" / "regression.yml")
    (script,) = (s["run"] for s in workflow["jobs"]["suite"]["steps"] if "green=" in str(s))

    git(tmp_path, "init", "--initial-branch", "main")
    for message in ("first", "second"):
        git(tmp_path, "commit", "--allow-empty", "--message", message)
    if tag is not None:
        git(tmp_path, "tag", "last-green", tag)
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, check=True, capture_output=True)
    subject = "log", "--format=%s", "-1"
    shown = [git(tmp_path, *subject, revision).strip() for revision in ("main", "HEAD")]
    assert shown == ["second" if tag is None else "first", "second"]


@pytest.mark.skipif(not _HADOLINT.is_file(), reason="hadolint has a wheel for x86-64 alone")
def test_dockerfile_passes_its_linter() -> None:
    subprocess.run([_HADOLINT, "--no-color", REPO / "Dockerfile"], check=True, timeout=60)


def test_image_gets_files_that_exist() -> None:
    kept = [
        line[1:] for line in (REPO / ".dockerignore").read_text().splitlines() if line[0] == "!"
    ]
    assert [name for name in kept if not (REPO / name).exists()] == []
    assert {"run_train.sh", "titan_moe", "pyproject.toml"} <= set(kept)
