"""A PostgreSQL of the tests' own: in a temporary folder, on a socket of its own, as a user that is not root."""

import getpass
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

PROGRAMS = ("initdb", "postgres")


def find(program: str) -> str | None:
    """Returns the program's path: from PATH, or the newest version in Debian's folder."""
    kept = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"), key=lambda path: int(path.parts[4]))
    return shutil.which(program) or (str(kept[-1]) if kept else None)


def why_not() -> str | None:
    """Returns why no PostgreSQL can run here; None if one can."""
    for program in PROGRAMS:
        if find(program) is None:
            return f"no {program} on the path or in /usr/lib/postgresql"
    return None


class Postgres:
    def __init__(self, folder: Path, user: str) -> None:
        self.folder, self.user = folder, user

    def url(self, schema: str = "public") -> str:
        host = quote(str(self.folder), safe="")
        return f"postgresql://{self.user}@/postgres?host={host}&options=-csearch_path%3D{schema}"

    def fresh(self) -> str:
        """Returns the URL of an empty database for one run."""
        schema = f"run_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(host=str(self.folder), user=self.user, dbname="postgres", autocommit=True) as db:
            db.execute(f"CREATE SCHEMA {schema}")
        return self.url(schema)


@contextmanager
def running_postgres(*, durable: bool = False) -> Iterator[Postgres]:
    """Starts a server. Only measurements need `durable`: tests kill coordinators, never the machine, so they skip fsync."""
    user = "nobody" if os.geteuid() == 0 else getpass.getuser()
    folder = Path(tempfile.mkdtemp(prefix="shoal-pg-"))
    owner = pwd.getpwnam(user)
    os.chown(folder, owner.pw_uid, owner.pw_gid)
    who: dict[str, Any] = (
        {"user": user, "group": owner.pw_gid, "cwd": folder} if os.geteuid() == 0 else {"cwd": folder}
    )
    data = folder / "data"
    programs = {name: os.path.realpath(find(name) or name) for name in PROGRAMS}
    subprocess.run(
        [programs["initdb"], "-D", data, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
        check=True,
        capture_output=True,
        timeout=60,
        **who,
    )
    settings = ["listen_addresses=", f"unix_socket_directories={folder}", "max_connections=300"]
    settings += [] if durable else ["fsync=off", "full_page_writes=off"]
    arguments = [word for setting in settings for word in ("-c", setting)]
    with (folder / "log").open("wb") as log:
        server: subprocess.Popen[bytes] = subprocess.Popen(
            [programs["postgres"], "-D", data, *arguments], stdout=log, stderr=log, **who
        )
    try:
        _wait_until_up(folder, user, server)
        yield Postgres(folder, user)
    finally:
        server.send_signal(signal.SIGINT)  # SIGINT ends the server even while clients are connected
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_up(folder: Path, user: str, server: "subprocess.Popen[bytes]") -> None:
    give_up_s = time.monotonic() + 30
    while True:
        assert server.poll() is None, (folder / "log").read_text()
        try:
            psycopg.connect(host=str(folder), user=user, dbname="postgres").close()
            return
        except psycopg.OperationalError:
            assert time.monotonic() < give_up_s, (folder / "log").read_text()
            time.sleep(0.1)
