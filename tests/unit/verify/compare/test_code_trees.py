"""The code of a run: this working tree, or a commit in a clean worktree."""

from pathlib import Path

import pytest

from tests.support.processes import git
from titan_moe.config.errors import ConfigError
from titan_moe.runtime.revision import files_hash
from titan_moe.verify.compare import code_trees
from titan_moe.verify.compare.code_trees import code_tree, remove_worktrees


@pytest.fixture
def repo(tmp_path: Path, monkeypatch) -> Path:
    """A repository of two commits."""
    folder = tmp_path / "repo"
    (folder / "titan_moe").mkdir(parents=True)
    (folder / "run_train.sh").write_text("exit 0\n")
    git(tmp_path, "init", "-q", str(folder))
    for number in (1, 2):
        (folder / "titan_moe" / "code.py").write_text(f"{number}\n")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "x")
    monkeypatch.setattr(code_trees, "REPO", folder)
    return folder


def test_a_revision_is_checked_out_clean(repo: Path, tmp_path: Path):
    first, second = code_tree("HEAD~1", tmp_path / "w"), code_tree("HEAD", tmp_path / "w")
    assert first.tree != second.tree and first.folder != second.folder
    assert (first.folder / "titan_moe" / "code.py").read_text() == "1\n"
    assert code_tree("HEAD", tmp_path / "w") == second, "found again"
    (second.folder / "titan_moe" / "code.py").write_text("3\n")
    with pytest.raises(ConfigError, match="files were changed there"):
        code_tree("HEAD", tmp_path / "w")
    remove_worktrees(tmp_path / "w")
    assert second.folder.exists() and not first.folder.exists(), "what was changed is kept"
    (second.folder / "titan_moe" / "code.py").write_text("2\n")
    git(repo, "worktree", "add", "--detach", str(tmp_path / "w" / "mine"))
    remove_worktrees(tmp_path / "w")
    assert [each.name for each in (tmp_path / "w").iterdir()] == ["mine"]
    git(repo, "worktree", "remove", str(tmp_path / "w" / "mine"))
    assert not any((tmp_path / "w").iterdir()) and "w/" not in git(repo, "worktree", "list")


def test_the_working_tree_s_hash_sees_uncommitted_files(repo: Path, tmp_path: Path):
    clean = code_tree("", tmp_path)
    assert clean.tree == code_tree("HEAD", tmp_path / "w").tree
    assert "changed" not in clean.description
    (repo / "titan_moe" / "new.py").write_text("4\n")
    changed = code_tree("", tmp_path)
    assert changed.tree != clean.tree and "changed" in changed.description
    assert "new.py" in git(repo, "status", "--porcelain", "--untracked-files=all"), "not staged"


def test_an_unknown_revision_is_told(repo: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="revision=nowhere: git knows no such commit"):
        code_tree("nowhere", tmp_path)


def test_a_run_of_other_code_is_noticed(repo: Path, tmp_path: Path):
    asked = code_tree("HEAD", tmp_path / "w")
    sha256 = files_hash(asked.folder / "titan_moe")
    assert asked.problem({"folder": "/x", "commit": "0" * 40, "sha256": sha256}) == ""
    found = asked.problem({"folder": "/x", "commit": "a" * 40, "changed": True, "sha256": "b" * 64})
    assert found.startswith("it ran /x at aaaaaaa, changed (sha256 bbbbbbbbbbbb) instead of ")
    assert f"{asked.folder / 'titan_moe'}, HEAD (" in found and sha256[:12] in found
    assert asked.problem({}).startswith("it ran a folder that is not recorded")
