"""Log lines about the progress of long downloads."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.shardcast.assembly import Assembly
from shoal.shardcast.client import download as download_module
from shoal.shardcast.client.download import Download, NoRelayLeft, _ProgressLog
from shoal.shardcast.client.relay_choice import RelayChoice
from shoal.shardcast.manifest_files import prepare_folder
from shoal.telemetry import Log


@pytest.fixture
def assembly(origin: Any, kit: Any, tmp_path: Path) -> Assembly:
    """An assembly of 11,820 bytes of which 9,020 are verified."""
    files = kit.random_files()
    sealed = origin.publish(7, files)
    prepare_folder(tmp_path / "v7", sealed)
    assembly = Assembly(tmp_path / "v7", sealed.body)
    for shard in assembly.missing()[:-4]:
        assembly.write(shard, files[shard.name][shard.start : shard.stop])
    return assembly


def test_progress_is_logged(
    assembly: Assembly, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "LOG_EVERY_S", 0.0)
    monkeypatch.setattr(download_module, "LOG_AFTER_S", 0.0)
    with caplog.at_level(logging.INFO):
        _ProgressLog(7, assembly, Log("worker")).log_if_due(lambda: "4 of 14 shards missing")
    assert "fetching version 7: [#######   ] 76 % of 0 MB" in caplog.text
    assert "4 of 14 shards missing" in caplog.text


def test_a_short_download_is_not_logged(assembly: Assembly, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _ProgressLog(7, assembly, Log("worker")).log_if_due(lambda: "")
    assert caplog.text == ""


def test_the_end_of_a_download_is_reported_however_it_ends(
    origin: Any, serve: Callable[[Any], str], assembly: Assembly
) -> None:
    """Otherwise `shoal join` would show the bar of a download that has ended until the next one begins."""
    seen: list[tuple[int, int, int]] = []

    def download(urls: list[str]) -> None:
        choice = RelayChoice(urls, on_progress=lambda *progress: seen.append(progress))
        Download(assembly, choice, log=Log("worker"), stop=threading.Event()).run(10.0)

    with pytest.raises(NoRelayLeft):
        download([])
    assert seen == [(7, 11_820, 11_820)]
    download([serve(origin.app)])
    assert seen[1] == (7, 9_020, 11_820) and seen[-1] == (7, 11_820, 11_820)
