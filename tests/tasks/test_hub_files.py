"""Data sets of the hub: addresses, the file of rows, and errors. Tests marked `environments` use the package `datasets`."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.tasks import make_task
from shoal.tasks.datasets.file_options import file_digests, keep_files, with_files_from
from shoal.tasks.datasets.hub_files import hub_file, with_hub_files
from shoal.tasks.registry import pin_task
from shoal.wire.run_spec import TaskSpec

ROWS = [{"q": f"{n} + 1?", "a": n + 1, "picture": b"png"} for n in range(30)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hub_file.cache_clear()


class StandInPackage(ModuleType):
    """Stands in for the package `datasets`."""

    def __init__(self) -> None:
        super().__init__("datasets")
        self.asked: list[tuple[Any, ...]] = []

    def disable_progress_bars(self) -> None:
        pass

    def load_dataset(self, name: str, config: str | None, *, split: str, revision: str | None) -> Any:
        self.asked.append((name, config, split, revision))
        if name == "nobody/nothing":
            raise ConnectionError("the hub cannot be reached\nsecond line")
        return ROWS


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> StandInPackage:
    package = StandInPackage()
    monkeypatch.setitem(sys.modules, "datasets", package)
    return package


def test_terms_have_the_digest_of_the_rows(package: StandInPackage, tmp_path: Path) -> None:
    address = "hf:org/sums?config=easy&split=test&revision=abc"
    spec = TaskSpec(
        name="qa",
        options={"path": address, "question": "q", "answer": "a", "grader": "number", "eval_share": 0.5},
    )
    make_task(spec)  # reads nothing
    public = keep_files(pin_task(spec), tmp_path / "kept")
    assert package.asked == [("org/sums", "easy", "test", "abc")]
    assert len(file_digests(public)) == 1 and "org/sums" not in public.model_dump_json()
    task = make_task(with_files_from(public, tmp_path / "kept"))
    assert task.problem("train", 0) == make_task(with_hub_files(spec)).problem("train", 0)
    lines = hub_file(address).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"q": row["q"], "a": row["a"]} for row in ROWS]


def test_mistakes_are_named(package: StandInPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("hf:", "hf:org/sums?part=2", "hf:org/sums?"):
        with pytest.raises(ValueError, match=r"expected hf:ORG/NAME\?split=train"):
            hub_file(address)
    with pytest.raises(
        ValueError, match=r"nothing: ConnectionError: the hub cannot be reached; check the name.*HF_HOME"
    ):
        hub_file("hf:nobody/nothing")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'shoal-rl\[datasets\]'"):
        hub_file("hf:org/sums")


@pytest.mark.environments
@pytest.mark.filterwarnings("default")
def test_a_local_folder_is_read_by_the_real_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for split, rows in (("train", ROWS[:20]), ("test", ROWS[20:])):
        lines = (json.dumps({"q": row["q"], "a": row["a"]}) for row in rows)
        path = tmp_path / "sums" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
    options: dict[str, bool | int | float | str] = {
        "path": f"hf:{tmp_path}/sums",
        "eval_path": f"hf:{tmp_path}/sums?split=test",
    }
    spec = TaskSpec(name="qa", options=options | {"question": "q", "answer": "a", "grader": "number"})
    task = make_task(with_hub_files(spec))
    assert sorted(int(task.problem("train", n).answer) for n in range(20)) == list(range(1, 21))
    assert sorted(int(task.problem("eval", n).answer) for n in range(10)) == list(range(21, 31))
    with pytest.raises(ValueError, match=r"sums.split=dev: .*; check the name, split and config"):
        hub_file(f"hf:{tmp_path}/sums?split=dev")
