"""One process: what is saved when, what is loaded, and every way a checkpoint can be bad."""

import io
import json
import os
import pickle
import resource
import shutil

import pytest
import torch
from torch import nn

from titan_moe.checkpoint import storage
from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.checkpoint.digests import write_listing
from titan_moe.config.job_config import Checkpoint
from titan_moe.runtime.errors import RunError


class _Toy(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.linear = nn.Linear(dim, 4)
        self.w_EFD = nn.Parameter(torch.randn(experts, 3, dim))


class _Run:
    """A model, its optimizer and its checkpointer; `seed` tells runs apart."""

    def __init__(self, folder, *, seed=0, dim=5, experts=2, num_experts=2, **config):
        torch.manual_seed(seed)
        self.model = _Toy(dim, experts)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.checkpointer = Checkpointer(
            Checkpoint(**{"enable": True, **config}),
            folder,
            modules=[self.model],
            optimizer=self.optimizer,
            num_experts=num_experts,
            job_record={"training": {"steps": 3}},
            merge_data=lambda states: states[0],
        )

    def save(self, step, **options):
        state = {"step": step, "data": {"0": step * 10}}
        self.checkpointer.save(step, state, **options)

    @property
    def weight(self):
        return self.model.linear.weight.detach().clone()

    @property
    def moment(self):
        return self.optimizer.state[self.model.w_EFD]["exp_avg"].clone()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "outputs"


@pytest.fixture
def saved(folder):
    """The folder of a run that saved steps 1 and 2."""
    run = _Run(folder)
    run.save(1)
    run.save(2)
    return folder


def _step(folder, step):
    return folder / "checkpoint" / f"step-{step}"


def _reseal(saved):
    """Digests that agree with what a hostile hand has left behind."""
    write_listing(_step(saved, 2), {})


def _names(folder):
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


def _refused(run, *words):
    """`run` cannot load; the one line of its error has all the words, and no file has changed."""
    before = {path: path.stat().st_mtime_ns for path in run.folder_to_watch.rglob("*")}
    with pytest.raises(RunError) as caught:
        run.checkpointer.load()
    assert {path: path.stat().st_mtime_ns for path in run.folder_to_watch.rglob("*")} == before
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert str(word) in line, line


def _watched(folder, **options):
    run = _Run(folder, seed=1, **options)
    run.folder_to_watch = folder
    return run


def test_everything_comes_back(folder):
    run = _Run(folder)
    torch.manual_seed(5)
    run.save(3)
    expected_random = torch.rand(4)
    other = _Run(folder, seed=1)
    assert not torch.equal(other.weight, run.weight)
    assert other.checkpointer.load() == {"step": 3, "data": {"0": 30}}
    assert torch.equal(other.weight, run.weight)
    assert torch.equal(other.moment, run.moment)
    assert torch.equal(torch.rand(4), expected_random)
    assert other.optimizer.state[other.model.w_EFD]["step"] == 1


def test_nothing_to_load(folder, saved):
    assert _Run(folder.parent / "fresh").checkpointer.load() is None
    assert _Run(saved, enable=False).checkpointer.load() is None


def test_later_steps_are_set_aside_and_kept(tmp_path):
    for step in (5, 15, 20):
        (tmp_path / f"step-{step}").mkdir()
    storage.set_aside_later(tmp_path, 5)
    (tmp_path / "step-20").mkdir()
    storage.set_aside_later(tmp_path, 5)
    assert storage.saved_steps(tmp_path) == [5]
    kept = sorted(path.name for path in tmp_path.glob("*abandoned*"))
    assert kept == ["step-15.abandoned-1", "step-20.abandoned-1", "step-20.abandoned-2"]


def test_manifest_tells_what_and_who(saved):
    manifest = json.loads((_step(saved, 2) / "manifest.json").read_text())
    assert manifest["tensors"]["model.w_EFD"] == {"shape": [2, 3, 5], "dtype": "float32"}
    assert set(manifest["checksums"]) == set(manifest["tensors"])
    assert manifest["num_experts"] == 2 and manifest["step"] == 2
    assert manifest["job"] == {"training": {"steps": 3}}
    assert manifest["code"]["torch"] == torch.__version__


def test_when_to_save(folder):
    run = _Run(folder, interval=3, enable_first_step_checkpoint=True, keep_latest_k=0)
    done = [step for step in range(1, 8) if run.checkpointer.maybe_save(step, {}, last=step == 7)]
    assert done == [1, 3, 6, 7]
    assert _names(folder) == ["step-1", "step-3", "step-6", "step-7"]
    for options in ({"load_only": True}, {"enable": False}):
        assert not _Run(folder, **options).checkpointer.maybe_save(3, {}, last=True)


def test_keep_latest(folder):
    run = _Run(folder, keep_latest_k=2)
    for step in (8, 9, 10):
        run.save(step)
    assert _names(folder) == ["step-10", "step-9"]


def test_load_step(saved):
    _refused(_watched(saved, load_step=7), "load_step=7", "steps 1, 2")
    assert _Run(saved, load_step=1).checkpointer.load()["step"] == 1
    assert _Run(saved).checkpointer.load()["step"] == 1, "step 2 was left behind"


def test_a_step_that_is_named_goes_before_what_the_run_began_with(saved):
    run = _Run(saved, seed=1, load_step=1)
    assert run.checkpointer.load()["step"] == 1
    run.save(2)
    with torch.no_grad():
        run.model.linear.weight.add_(1)
    state = run.checkpointer.load(2)
    assert state == {"step": 2, "data": {"0": 20}}
    assert torch.equal(run.weight, _Run(saved).weight)
    assert run.checkpointer.last_step == 2


@pytest.mark.parametrize("part", ["model", "optimizer", "train_state", "dataloader"])
def test_exclude_from_loading(saved, part):
    original, run = _Run(saved), _Run(saved, seed=1, exclude_from_loading=[part])
    state = run.checkpointer.load()
    assert torch.equal(run.weight, original.weight) == (part != "model")
    assert torch.equal(run.moment, original.moment) == (part != "optimizer")
    assert ("step" in state) == (part != "train_state")
    assert ("data" in state) == (part != "dataloader")


def test_initial_load_path(saved, tmp_path):
    original, path = _Run(saved), str(_step(saved, 2))
    model_only = _Run(tmp_path / "a", seed=1, initial_load_path=path)
    assert model_only.checkpointer.load() is None
    assert torch.equal(model_only.weight, original.weight)
    assert not torch.equal(model_only.moment, original.moment)
    whole = _Run(tmp_path / "b", seed=1, initial_load_path=path, initial_load_model_only=False)
    assert whole.checkpointer.load()["step"] == 2
    assert torch.equal(whole.moment, original.moment)


def test_own_checkpoint_wins_over_initial_load_path(saved, tmp_path):
    own = _Run(tmp_path / "own", seed=1, initial_load_path=str(_step(saved, 2)))
    own.save(1)
    assert own.checkpointer.load()["step"] == 1


def test_seed_checkpoint(folder):
    seed = _Run(folder, create_seed_checkpoint=True)
    seed.save(0)
    assert sorted(path.name for path in _step(folder, 0).iterdir()) == [
        ".metadata",
        "SHA256SUMS",
        "__0_0.distcp",
        "manifest.json",
    ]
    run = _Run(folder, seed=1)
    assert run.checkpointer.load() is None
    assert torch.equal(run.weight, seed.weight)


def test_last_save_model_only_cannot_be_resumed(folder):
    run = _Run(folder, last_save_model_only=True)
    run.save(1)
    run.save(2, last=True)
    _refused(_watched(folder), "step-2", "model only", "load_step", "initial_load_path")
    path = str(_step(folder, 2))
    _refused(
        _watched(folder.parent / "b", initial_load_path=path, initial_load_model_only=False),
        "initial_load_model_only=true",
    )


# Bad checkpoints.


def test_another_model(saved):
    _refused(
        _watched(saved, dim=6), "step-2", "model.linear.weight float32[4, 5] (wanted float32[4, 6])"
    )


def test_another_number_of_experts(saved):
    _refused(_watched(saved, experts=4, num_experts=4), "has 2 experts, the model 4")


def test_missing_and_extra_tensors_are_listed(saved):
    run = _watched(saved)
    run.model.extra = nn.Parameter(torch.ones(1))
    del run.model.linear.bias
    run.optimizer.param_groups[0]["params"] = [run.model.w_EFD, run.model.linear.weight]
    _refused(run, "it lacks model.extra", "the model has not, model.linear.bias")


def test_missing_folder(tmp_path):
    _refused(_watched(tmp_path, initial_load_path="/no/such/step-1"), "/no/such/step-1", "exist")


def test_foreign_folder(tmp_path):
    path = tmp_path / "foreign"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"x")
    _refused(_watched(tmp_path, initial_load_path=str(path)), path, "no manifest.json")


def test_latest_without_manifest_is_not_passed_over(saved):
    (_step(saved, 2) / "manifest.json").unlink()
    _refused(_watched(saved), "step-2", "no manifest.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": "two"}', "\x00"])
def test_garbled_manifest(saved, text):
    (_step(saved, 2) / "manifest.json").write_text(text)
    _refused(_watched(saved), "manifest.json is damaged")


@pytest.mark.parametrize("text", [None, "", "{}", "[]"])
def test_garbled_train_state(saved, text):
    path = _step(saved, 2) / "train_state.json"
    path.unlink() if text is None else path.write_text(text)
    _refused(_watched(saved), "train_state.json", "step-2")


def test_wrong_checksum_names_the_tensor(saved):
    path = _step(saved, 2) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["checksums"]["model.w_EFD"] = "0123456789abcdef"
    path.write_text(json.dumps(manifest))
    _reseal(saved)
    _refused(_watched(saved), "step-2 is damaged", "checksum of model.w_EFD")


def test_flipped_byte_in_a_tensor_file(saved):
    run = _Run(saved)
    path = _step(saved, 2) / "__0_0.distcp"
    raw = bytearray(path.read_bytes())
    at = raw.index(run.model.w_EFD.detach().numpy().tobytes())
    raw[at + 7] ^= 1
    path.write_bytes(raw)
    _refused(_watched(saved), "step-2", "model.w_EFD")


def test_truncated_tensor_file(saved):
    path = _step(saved, 2) / "__0_0.distcp"
    os.truncate(path, path.stat().st_size // 2)
    _refused(_watched(saved), "__0_0.distcp is truncated")


def test_emptied_tensor_file_of_right_length(saved):
    path = _step(saved, 2) / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    _refused(_watched(saved), "__0_0.distcp is damaged")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_missing_file(saved, name):
    (_step(saved, 2) / name).unlink()
    _refused(_watched(saved), "step-2 is incomplete", name)


def test_metadata_of_another_checkpoint(saved, tmp_path):
    other = _Run(tmp_path / "other", dim=6)
    other.save(1)
    for name in (".metadata", "__0_0.distcp"):
        shutil.copy(_step(tmp_path / "other", 1) / name, _step(saved, 2) / name)
    _refused(_watched(saved), "step-2")


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def _pickled_with_dcp(evil):
    from torch.distributed.checkpoint.metadata import Metadata

    return pickle.dumps(Metadata({}, planner_data=evil, storage_data={}))


@pytest.mark.parametrize("wrap", [pickle.dumps, _pickled_with_dcp])
def test_malicious_metadata_is_not_run(saved, tmp_path, wrap):
    (_step(saved, 2) / ".metadata").write_bytes(wrap(_Evil(tmp_path / "ran")))
    _reseal(saved)
    _refused(_watched(saved), ".metadata is damaged or not to be trusted", "posix.system")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("raw", [b"", b"garbage", pickle.dumps({"a": 1})])
def test_garbled_metadata(saved, raw):
    (_step(saved, 2) / ".metadata").write_bytes(raw)
    _reseal(saved)
    _refused(_watched(saved), ".metadata is damaged or not to be trusted")


def _edit_metadata(saved, edit):
    path = _step(saved, 2) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))
    _reseal(saved)


def test_byte_entries_are_refused(saved):
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    _edit_metadata(
        saved,
        lambda metadata: metadata.state_dict_metadata.update({"x": BytesStorageMetadata()}),
    )
    _refused(_watched(saved), "not to be trusted", "BytesStorageMetadata")


def test_files_outside_the_folder_are_refused(saved):
    def edit(metadata):
        next(iter(metadata.storage_data.values())).relative_path = "../step-1/__0_0.distcp"

    _edit_metadata(saved, edit)
    _refused(_watched(saved), "not to be trusted")


def test_stream_transforms_are_refused(saved):
    def edit(metadata):
        next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]

    _edit_metadata(saved, edit)
    _refused(_watched(saved), "not to be trusted")


def test_malicious_tensor_file_is_not_run(saved, tmp_path):
    def edit(metadata):
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(raw)

    buffer = io.BytesIO()
    torch.save(_Evil(tmp_path / "ran"), buffer)
    raw = buffer.getvalue()
    (_step(saved, 2) / "__0_0.distcp").write_bytes(raw)
    _edit_metadata(saved, edit)
    _refused(_watched(saved), "step-2: __0_0.distcp is damaged or not to be trusted")
    assert not (tmp_path / "ran").exists()


def test_no_place_to_save(tmp_path):
    folder = tmp_path / "outputs"
    folder.write_text("a file in the way")
    with pytest.raises(RunError, match=f"cannot save checkpoint {folder}/checkpoint/step-1: Not a"):
        _Run(folder).save(1)


def test_a_full_disk_is_named_as_such(folder):
    run = _Run(folder, dim=5000)
    run.save(1)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))
    try:
        with pytest.raises(RunError, match="step-2: File too large"):
            run.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert _names(folder) == ["step-1"]
