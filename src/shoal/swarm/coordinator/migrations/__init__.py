"""From one layout of the tables to the next, by Alembic: versions/ holds what leads to each from the one before.

All in the transaction that opens the database, so a start that fails half-way has changed nothing, and of several coordinators
that start at once the first does it. A database that is new or current costs a look at `alembic_version`: Alembic
itself is loaded only where there is something to do.
"""

from sqlalchemy import Connection, insert, inspect, select, update

from shoal.swarm.coordinator.store.schema import SCHEMA_VERSION, alembic_version, metadata, run

HEAD = str(SCHEMA_VERSION)


def migrate(db: Connection) -> None:
    """Bring a database up to date; a ValueError if it is newer than this software."""
    new = not inspect(db).has_table(run.name)
    metadata.create_all(db)
    found = db.execute(select(alembic_version.c.version_num)).scalar_one_or_none()
    if found is None:
        found = HEAD if new else _layout_before_alembic(db)
        db.execute(insert(alembic_version).values(version_num=found))
    if found == HEAD:
        return
    if int(found) > SCHEMA_VERSION:
        raise ValueError(
            f"the database has layout {found}, this software reads {HEAD}; use the version that wrote it"
        )
    _upgrade(db)
    db.execute(update(run).values(schema_version=SCHEMA_VERSION))
    for table in metadata.sorted_tables:
        for index in table.indexes:
            index.create(db, checkfirst=True)


def _layout_before_alembic(db: Connection) -> str:
    """The first three layouts were numbered in the `run` table alone."""
    return str(db.execute(select(run.c.schema_version)).scalar_one_or_none() or HEAD)


def _upgrade(db: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "shoal.swarm.coordinator:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = db
    command.upgrade(config, "head")
