"""The index of a data file: kept beside the file by its digest, usable by several processes, made again if anything changed."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.tasks import make_task
from shoal.tasks.datasets import row_index
from shoal.tasks.datasets.data_set import DataSet
from shoal.tasks.datasets.file_options import file_digests, with_files_from
from shoal.tasks.grading.math_grader import _SIMPLE, math_grader
from shoal.tasks.registry import _make, keep_task_files
from shoal.wire.run_spec import TaskSpec


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(row_index, "CACHE_FROM_ROWS", 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rows(count: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {number}?", "answer": f"#### {number}"} for number in range(count)]


def write(path: Path, found: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in found))
    return path


def load(path: Path, **options: int | float | str) -> DataSet:
    _make.cache_clear()
    task = make_task(TaskSpec(name="gsm8k", options={"path": str(path), **options}))
    assert isinstance(task, DataSet)
    return task


def refuse_to_read(*_: object) -> Any:
    raise AssertionError("the index should come from the cache")


def test_an_index_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.jsonl", rows(40))
    first = [load(path).problem("train", seed) for seed in range(40)]
    assert (tmp_path / "rows.jsonl.index").exists()
    with monkeypatch.context() as patch:
        patch.setattr(row_index, "_build", refuse_to_read)
        assert [load(path).problem("train", seed) for seed in range(40)] == first
    write(path, rows(41))
    assert load(path).indices["path"].num_rows == 41, "another digest"
    whole = (tmp_path / "rows.jsonl.index").read_bytes()
    for broken in (b"broken", whole[: len(whole) // 2], whole[:-2000].ljust(len(whole), b"?")):
        (tmp_path / "rows.jsonl.index").write_bytes(broken)
        assert load(path).indices["path"].num_rows == 41


def test_rows_of_parquet_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows(40)), path)
    first = [load(path).problem("eval", seed) for seed in range(5)]
    monkeypatch.setattr(row_index, "_build", refuse_to_read)
    assert [load(path).problem("eval", seed) for seed in range(5)] == first


def test_a_folder_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "rows.jsonl", rows(40))
    beside = str(path.with_name("rows.jsonl.index"))
    replace = os.replace

    def replace_elsewhere(source: Any, target: Any) -> None:
        if str(target) == beside:
            raise PermissionError(13, "read-only", beside)
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_elsewhere)
    load(path).problem("train", 0)
    assert not Path(beside).exists()
    monkeypatch.setattr(row_index, "_build", refuse_to_read)
    assert load(path).problem("train", 0), "from the user's cache folder"


def test_a_folder_without_write_permission_stays_as_it_is_also_for_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows(40)), folder / "rows.parquet")
    folder.chmod(0o555)
    try:
        first = load(folder / "rows.parquet").problem("train", 0)
        assert [one.name for one in folder.iterdir()] == ["rows.parquet"]
        monkeypatch.setattr(row_index, "_build", refuse_to_read)
        assert load(folder / "rows.parquet").problem("train", 0) == first, "from the user's cache folder"
    finally:
        folder.chmod(0o755)


def test_all_machines_of_a_run_leave_out_the_rows_that_the_coordinator_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rows(200)
    found[3] = {"question": "?"}
    path = write(tmp_path / "rows.jsonl", found)
    spec = TaskSpec(name="gsm8k", options={"path": str(path)})
    kept = keep_task_files(spec, tmp_path / "data", reports=tmp_path)
    assert set(kept.options) == {"path", "checks_path"} and len(file_digests(kept)) == 2
    report = [json.loads(line) for line in (tmp_path / "unusable-rows-rows.jsonl").read_text().splitlines()]
    assert report[0]["row"] == 4 and "no field 'answer'" in report[0]["reason"]
    assert keep_task_files(kept, tmp_path / "data", reports=tmp_path) == kept
    monkeypatch.setattr(row_index, "_build", refuse_to_read)
    copied = make_task(with_files_from(kept, tmp_path / "data"))
    assert isinstance(copied, DataSet) and copied.problem("train", 7) == load(path).problem("train", 7)
    monkeypatch.undo()
    # A validator has the files without the index, and does not check gold answers again.
    other = tmp_path / "other"
    other.mkdir()
    for digest in file_digests(kept).values():
        (other / digest).write_bytes((tmp_path / "data" / digest).read_bytes())
    checked = make_task(with_files_from(kept, other))
    assert isinstance(checked, DataSet) and list(checked.indices["path"].bad) == [4]
    assert checked.problem("eval", 5) == copied.problem("eval", 5)


def test_gold_answers_that_are_not_asked_about_can_be_parsed() -> None:
    golds = ["1/2", "-\\frac{3}{4}", "\\dfrac{10}{3}", "2\\sqrt{3}", "\\sqrt{2}", "3\\pi", "-\\pi", "+7/9"]
    assert all(_SIMPLE.fullmatch(gold) for gold in golds) and all(math_grader().can_parse(golds))
