"""Plain folders of versions: what transformers loads, and the link to the newest one."""

import errno
import shutil
from pathlib import Path

import pytest

from shoal.model.builtin import create_model
from shoal.model.plain_folder import link_newest, write_plain_folder
from shoal.model.tokenizer import CharTokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    create_model("tiny", folder, 0)
    (folder / "manifest.json").write_text("{}")
    (folder / "model.safetensors.delta").write_bytes(b"delta")
    return folder


def test_the_link_leads_to_the_newest_version(tiny: Path, tmp_path: Path) -> None:
    for version in (1, 2, 9):
        link_newest(tiny, version, tmp_path)
        assert (tmp_path / "newest").resolve() == tmp_path / "plain" / f"v{version}"
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == ["v2", "v9"]
    names = {path.name for path in (tmp_path / "newest").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not names & {"manifest.json", "model.safetensors.delta"}
    assert (tmp_path / "newest" / "model.safetensors").samefile(tiny / "model.safetensors")


def test_transformers_loads_the_plain_folder_of_the_tiny_model(tiny: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_plain_folder(tiny, tmp_path / "plain")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "plain")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    text = "sort: 3 1\n2 = ?"
    own = CharTokenizer.load(tiny).encode_prompt(text, chat=False)
    assert tokenizer(text).input_ids == own
    assert tokenizer.decode(own, skip_special_tokens=True) == text
    assert model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits.shape[1] == len(
        own
    )
    assert isinstance(load_tokenizer(tmp_path / "plain"), CharTokenizer)


def test_the_source_keeps_its_own_tokenizer_file(tiny: Path, tmp_path: Path) -> None:
    source = tmp_path / "v1"
    shutil.copytree(tiny, source)
    (source / "tokenizer.json").write_text("published")
    write_plain_folder(source, tmp_path / "plain")
    assert (source / "tokenizer.json").read_text() == "published"
    assert load_tokenizer(tmp_path / "plain").vocab_size > 0


def test_a_copy_that_does_not_fit_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shoal.model.plain_folder.link_or_copy", half)
    with pytest.raises(OSError, match="No space left"):
        write_plain_folder(tiny, tmp_path / "out" / "plain")
    assert list((tmp_path / "out").iterdir()) == []
