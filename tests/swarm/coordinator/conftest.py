"""SHOAL_TEST_DATABASE=postgresql runs every test of this folder on a PostgreSQL that is started for it, SHOAL_TEST_STORE=s3 on an
object store."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_swarm
from small_swarm import CONFIG, LOG, SPEC, SmallSwarm

from s3_stores import Store, strict_store
from shoal.swarm.coordinator.context import open_coordinator
from shoal.swarm.coordinator.store import database as database_module
from shoal.swarm.coordinator.store.database import Database

try:
    from postgres import Postgres, running_postgres, why_not
except ModuleNotFoundError:  # psycopg is an extra
    Postgres, why_not = None, lambda: "no psycopg"  # type: ignore[assignment, misc]


@pytest.fixture(scope="session")
def postgres() -> Iterator["Postgres"]:
    if why_not() is not None:
        pytest.skip(f"PostgreSQL: {why_not()}")
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Lets SQLite return before data is on disk: only a power cut could tell. Coordinators in child processes still wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database_module, "SQLITE_SYNCHRONOUS", "OFF")
        yield


@pytest.fixture(scope="session", autouse=True)
def chosen_database(request: pytest.FixtureRequest) -> Iterator[None]:
    if os.environ.get("SHOAL_TEST_DATABASE") == "postgresql":
        small_swarm.FRESH_DATABASE = request.getfixturevalue("postgres").fresh
    yield
    small_swarm.FRESH_DATABASE = None


@pytest.fixture(scope="session")
def s3() -> Iterator[Store]:
    with strict_store() as store:
        yield store


@pytest.fixture(scope="session", autouse=True)
def chosen_store(request: pytest.FixtureRequest) -> Iterator[None]:
    if os.environ.get("SHOAL_TEST_STORE") == "s3":
        small_swarm.STORE_URL = request.getfixturevalue("s3").url
    yield
    small_swarm.STORE_URL = ""


@pytest.fixture(scope="session")
def fresh_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with keys and empty tables for tests to copy: creating them takes longer than most tests."""
    dir = tmp_path_factory.mktemp("fresh") / "run"
    open_coordinator(CONFIG, SPEC, dir, log=LOG).close()
    return dir


@pytest.fixture
def swarm(request: pytest.FixtureRequest, fresh_run: Path, tmp_path: Path) -> Iterator[SmallSwarm]:
    """Yields a coordinator with no policy, no relay and no node yet; behind a real server for tests marked `on_socket`."""
    shutil.copytree(fresh_run, tmp_path / "run")
    on_socket = request.node.get_closest_marker("on_socket") is not None
    swarm = SmallSwarm(tmp_path / "run", on_socket=on_socket)
    yield swarm
    swarm.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Yields an empty database of each kind."""
    sqlite = request.param == "sqlite"
    database = Database(tmp_path / "x.db" if sqlite else request.getfixturevalue("postgres").fresh())
    yield database
    database.close()
