"""The running code by folder, commit and hash."""

from pathlib import Path

from tests.support.processes import git
from titan_moe.runtime.revision import (
    CHECKOUT,
    PACKAGE,
    checkout_around,
    code_in_words,
    code_revision,
    files_hash,
    running_code,
    wanted_checkout,
)


def test_running_code_is_this_package() -> None:
    found = running_code()
    assert found["folder"] == str(PACKAGE) and found["sha256"] == files_hash(PACKAGE)
    assert (PACKAGE / "train.py").is_file()
    assert code_in_words(found).startswith(str(PACKAGE))


def test_files_hash_covers_names_and_contents(tmp_path: Path) -> None:
    hashes = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2"), ("sub/b.py", "2")):
        folder = tmp_path / str(len(hashes))
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
        (folder / "a.txt").write_text(str(len(hashes)))
        hashes.append(files_hash(folder))
    assert len(set(hashes)) == 4
    assert files_hash(tmp_path / "2") == hashes[2]


def test_code_revision_needs_the_folders_own_repository(tmp_path: Path) -> None:
    git(tmp_path, "init")
    assert code_revision(tmp_path) is None, "no commit yet"
    (tmp_path / "inside").mkdir()
    assert code_revision(tmp_path / "inside") is None
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "x")
    found = code_revision(tmp_path)
    assert found is not None and len(str(found["commit"])) == 40 and found["changed"] is False
    for name, text, changed in (("file", "2", True), ("file", "1", False), ("new.py", "", True)):
        (tmp_path / name).write_text(text)
        assert (code_revision(tmp_path) or {})["changed"] is changed


def test_files_that_recipes_make_do_not_count_as_changed_code(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / ".gitignore").write_text((CHECKOUT / ".gitignore").read_text())
    (tmp_path / ".git" / "info" / "exclude").write_text(".gitignore")
    for name in ("data/c4", "models/x", "assets/x", "outputs/a", "titan_moe/data/new.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".venv").symlink_to("/usr")
    assert git(tmp_path, "status", "--porcelain", "-uall") == "?? titan_moe/data/new.py\n"


def test_checkout_around_finds_the_checkout_of_a_folder(tmp_path: Path, monkeypatch) -> None:
    assert checkout_around(tmp_path) is None
    assert checkout_around(CHECKOUT / "configs" / "debug") == CHECKOUT
    monkeypatch.chdir(CHECKOUT / "configs")
    assert wanted_checkout({}) == CHECKOUT
    assert wanted_checkout({"TITAN_MOE_CHECKOUT": str(tmp_path)}) == tmp_path.resolve()
